"""Layers and networks. They know one device and nothing distributed."""
