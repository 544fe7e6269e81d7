"""Checkpoints: their format on disk, saving them in the background, and loading them into any world size."""
