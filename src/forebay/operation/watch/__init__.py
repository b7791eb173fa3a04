"""Watch a server: sample its processes, poll its health, follow its log, judge its state."""
