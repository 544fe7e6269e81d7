"""Interactions of users with items (MovieLens, Goodreads, your own files) -> prepared histories."""
