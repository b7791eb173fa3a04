"""Plans for SGLang."""
