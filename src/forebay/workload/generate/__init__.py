"""Large data sets from a served model, exactly once. One page of how a run lives:

    sources.py      input files -> raw rows, streamed, in an order that never changes
    rows.py         raw row -> Row (a conversation whose assistant turns will be generated) or Malformed (why not)
    index.py        an SQLite file, rebuilt at every start from input and journal: which rows there are, which are done
    journal.py      the only durable state: append-only, checksummed; whatever it does not hold has not happened
    fingerprint.py  what the run is tied to: model, server settings, sampling, gates
    gates.py        is an answer good enough: truncated, empty, repeating, unclosed reasoning
    lanes.py        the servers: each filled by its own measured limit, taken out when dead, put back when ready
    revive.py       ``--up``: starting a server again, with back-off, a bounded number of times
    turns.py        one conversation: turn by turn, gate by gate
    job.py          the run: verbs only
    output.py       finished rows in input order, set-aside and failed rows, the manifest; all atomic
    progress.py     what the run shows while it runs

Owners: ``job`` owns the journal and the index (one thread writes both); a lane owns its requests; ``output`` reads only
what is durable. A row is known by its key (``rows.py``), never by its position: positions are valid within one process
only.
"""
