"""Open and check prepared datasets, and make this rank's batches of them."""
