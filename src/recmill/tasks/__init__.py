"""What a model learns: its loss and its metrics."""
