"""Benchmarks of Forebay and of its peers.

Run one from the repository's folder: ``python -m benchmarks.NAME --help``.
"""
