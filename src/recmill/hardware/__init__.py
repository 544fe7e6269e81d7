"""Facts about this machine: CPU, memory, and which precisions it can compute with. No torch, except in `probe`."""
