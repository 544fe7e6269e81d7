"""Where table rows live."""
