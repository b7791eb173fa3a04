"""The HTTP front: OpenAI endpoints, health, metrics. Imports neither torch nor transformers."""
