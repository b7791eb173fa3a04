"""Bring up, wait, verify, diagnose, take down; the record of each run."""
