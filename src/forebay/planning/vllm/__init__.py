"""Plans for vLLM."""
