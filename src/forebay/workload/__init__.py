"""Put a server to work over HTTP: bench and generate."""
