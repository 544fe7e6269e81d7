"""Jobs of schedulers: where a run is to be trained, the script that does it, and what became of it. No torch."""
