"""Radix tree over pages, tiers, policies, transfers, disk store. Knows nothing of models or HTTP."""
