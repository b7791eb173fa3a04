"""Page pools, eviction queues, and the tree's pages in them."""
