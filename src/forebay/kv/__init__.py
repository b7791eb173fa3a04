"""What one page of KV cache is, and the sizes of the pools that hold pages. Shared by the planner and the engine."""
