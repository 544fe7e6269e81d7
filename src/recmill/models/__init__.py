"""What can be trained: each model's Config, its tables, and how its network is built. No torch at import."""
