"""The host tier's memory, shared by all ranks of a node."""
