"""Back up, evict and load back: which pages move between the tiers, and when."""
