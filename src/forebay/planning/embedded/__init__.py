"""Plans for the embedded server."""
