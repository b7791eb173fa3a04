"""Measure a server over HTTP.

settings.py     the settings of a bench
prompts.py      blocks of tokens or words made from ids: equal ids give equal prefixes
load_script.py  the load: sessions, turns and arrival times, a function of settings and salt
run_load.py     sends a load, closed or open loop, and measures the times
samples.py      the measurements of one request
stats.py        percentiles and ratios with confidence intervals
cache.py        brings the cache into a state, and checks that it is in it
run.py          one run: identity, cache state, load, counters, result
compare.py      A against B, in interleaved rounds
result.py       the result as a record (JSON) and as a table
summary.py      from samples to a result
report.py       the self-contained HTML report
"""
