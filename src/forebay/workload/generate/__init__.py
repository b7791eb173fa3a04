"""Generate large data sets from a served model, each row exactly once.

    sources.py          input files as raw rows, streamed, always in the same order
    rows.py             a raw row as a ``Row`` (a conversation to generate) or as ``Malformed``
    index.py            an SQLite file, rebuilt at every start: the rows, and which of them are finished
    journal.py          the only durable state: an append-only file of checksummed lines
    run_fingerprint.py  the model, server settings, sampling and filters that a run must not change
    quality_filters.py  whether an answer is acceptable: truncated, empty, repeating, unclosed reasoning
    server_pool.py      the servers: how much each is sent, which are down, when they are back
    restart.py          ``--up``: start a server again, with back-off, a bounded number of times
    turns.py            one turn of one row: the request, the filters, the retries
    dispatch.py         rows to servers, answers to the journal
    job.py              a whole run, from the lock to the manifest
    output.py           finished rows in input order, rejected and failed rows, the manifest
    output_files.py     the files these are written to, and their names
    shards.py           one output file: JSON lines or Parquet
    progress.py         what the run shows while it runs
    ray.py              the same as a Ray Data stage (needs ``forebay[ray]``)

``job`` owns the journal and the index; one thread writes both. A row is known by its key (``rows.py``), never by its
position: positions hold within one process only.
"""
