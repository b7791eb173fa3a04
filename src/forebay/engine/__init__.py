"""The embedded inference server (the extra forebay[engine])."""
