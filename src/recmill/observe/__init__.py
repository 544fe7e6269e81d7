"""What a run tells: log, progress, run directory."""
