"""The radix tree over pages and its keys."""
