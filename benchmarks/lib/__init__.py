"""What the benchmarks share: peer servers, a small client, statistics."""
