"""What a checkpoint is: geometry, weight bytes, where models come from. No torch."""
