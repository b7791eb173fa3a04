"""Put a server to work over HTTP: ``bench`` and ``generate``, against any OpenAI-compatible server.

client.py     one server's HTTP: chat and completions, whole or streamed; failures by kind
answers.py    what an OpenAI server answers, and its usage with cached tokens per tier
counters.py   the server's own counters (/metrics), as differences over a run
target.py     what a person may name: an address or a run; and what answers there
limits.py     how many requests at once a server takes: measured, not configured
generate/     large data sets, exactly once
bench/        load, cache states, statistics, reports
ray.py        ``generate`` as a Ray Data stage (needs ``forebay[ray]``)
"""
