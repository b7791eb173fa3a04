"""The memory arithmetic that all servers share."""
