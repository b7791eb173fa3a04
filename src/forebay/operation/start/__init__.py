"""Bring up: inputs, preflight, launch, supervise."""
