"""Prefix matching and insertion, and allocation of a sequence's pages."""
