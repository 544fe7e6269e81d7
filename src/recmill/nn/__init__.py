"""Layers and networks. One device; nothing distributed."""
