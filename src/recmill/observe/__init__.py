"""What a run reports: log, progress, run directory."""
