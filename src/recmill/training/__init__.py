"""Sharding, optimizers, the loop, evaluation and checkpoints."""
