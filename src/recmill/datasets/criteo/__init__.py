"""Prepare Criteo click logs (1TB and Kaggle). `steps` is the entry point, `spark` its engine for a cluster."""
