"""``bench`` and ``generate``: workloads over HTTP, for any OpenAI-compatible server.

client.py             requests to one server: chat and completions, whole or streamed
connections.py        HTTP/1.1 with keep-alive
answers.py            the answers of an OpenAI-compatible server, and its usage with cached tokens per tier
failures.py           the kinds of failure of a request
counters.py           the server's own counters (/metrics), as differences over a run
target.py             what a server serves, and where ``forebay up`` will serve
concurrency_limit.py  how many requests at once a server gets: measured, not configured
loop.py               the event loop
generate/             large data sets, each row exactly once
bench/                loads, cache states, statistics, reports
"""
