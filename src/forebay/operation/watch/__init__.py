"""Watch a server: sample its processes, poll its health, follow its log, derive its state."""
