"""Verify that the cache is in effect: asked, effective, observed."""
