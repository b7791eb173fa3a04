"""Take down, and check that nothing is left."""
