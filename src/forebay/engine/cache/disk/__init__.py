"""The disk tier: content-addressed pages in append-only segment files."""
