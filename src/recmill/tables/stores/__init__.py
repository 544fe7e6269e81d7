"""`cached_ssd`: rows of tables in a file, with a cache of them in memory. The config key is `tables.store`."""
