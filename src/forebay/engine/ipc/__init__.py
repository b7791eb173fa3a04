"""Messages and sockets between the API server and the workers."""
