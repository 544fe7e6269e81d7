"""Checkpoints: their format on disk, saving them in the background, and loading them into any world size.

Entry points: `saver.Saver`, `loading.find_checkpoint`, `loading.load`; `format.committed` and `format.verify` list and
check them without torch.
"""
