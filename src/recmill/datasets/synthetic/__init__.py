"""Generated datasets: synthetic ones, whose best reachable metrics are known, and random ones for benchmarks."""
