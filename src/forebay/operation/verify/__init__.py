"""Is the cache in effect: asked, effective, observed."""
