"""From what the user calls a model to a checkpoint folder on this machine."""
