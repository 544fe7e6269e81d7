"""Our own CPU kernels: compiled where they run, used where torch's are slow."""
