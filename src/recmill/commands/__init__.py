"""One narrative per command."""
