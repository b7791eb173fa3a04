"""Measure a server over HTTP.

settings.py   what the user asked
prompts.py    blocks of tokens or words made from ids, so that equal ids are equal prefixes and nothing else is
scripts.py    the load as a script: sessions, turns, arrival times; a pure function of the settings and the salt
load.py       plays a script, closed or open loop, and takes the times
samples.py    what was measured of each request
stats.py      percentiles and ratios with intervals
cache.py      brings the cache into the state asked for, and sees that it is
run.py        one measured run: identity, cache state, load, counters, result
compare.py    A against B, in interleaved rounds
result.py     the result as a record (JSON), and as a table
report.py     the self-contained HTML report
"""
