"""Forebay brings up LLM servers with a tiered KV cache, proves they fit and work, and puts them to work.

Where things live (imports follow the arrows only; ``tests/architecture`` holds them):

    cli -> operation, planning, workload -> servers -> machine, model
    engine -> model, planning

The modules directly in this package (``errors``, ``causes``, ``sizes``, ``paths``) are vocabulary that every part
shares.
"""

__version__ = "0.1.0"
