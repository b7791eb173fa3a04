"""Requests in, batches out."""
