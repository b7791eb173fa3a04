"""Check a start-up log's numbers against the model's geometry."""
