"""Prepared dataset -> this rank's batches."""
