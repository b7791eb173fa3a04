"""The worker processes, one per rank, and the engine loop of rank 0."""
