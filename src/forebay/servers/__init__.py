"""Servers seen from outside, one module each: embedded, sglang, vllm.

base.py         the words: StartRequest in, Launch out; readings of an answer; the ``Server`` protocol
install.py      where a server's Python is, and its version, without importing it
flags.py        reading flags out of an argv
http.py         addresses, and a request whose failures are values
prometheus.py   the text of /metrics into samples
embedded.py, sglang.py, vllm.py   each server's command line, endpoints, process roles, counters
registry.py     a name or a URL to its ``Server``
grammar/        log lines to stages and facts
"""
