"""Stores: where the rows of tables live. `registry.STORES` lists them; the config key is `tables.store`."""
