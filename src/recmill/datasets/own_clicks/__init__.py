"""Click logs with columns of any kind, by a schema."""
