"""HTTP itself: the listening socket, the limits of a connection, request bodies and JSON answers."""
