"""One file per architecture family."""
