"""Raw or synthetic data -> prepared datasets. No torch in here."""
