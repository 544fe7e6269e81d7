"""The store `cached_ssd` (config key `tables.store`): table rows live in a file, with a cache in memory."""
