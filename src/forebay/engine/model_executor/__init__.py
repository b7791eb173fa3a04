"""Runs a batch on one rank: model loading, batch layout, forward pass, sampling."""
