"""Criteo click logs (1 TB and Kaggle) -> a prepared dataset. `steps` is the entry point that the registry names."""
