"""Checkpoints: their format on disk, saving them in the background, and loading them into any world size.

Entry points: `format.newest_or_best`, `saver.Saver`, `loading.load`.
"""
