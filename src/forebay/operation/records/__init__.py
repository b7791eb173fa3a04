"""The record of each run, its events, and the processes it owns."""
