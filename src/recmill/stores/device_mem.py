"""`device_mem`: every row in the memory of the process that owns it (RAM on CPU, HBM on a GPU)."""

COMPUTE_KERNELS = ["fused"]  # what TorchRec's planner may choose from: FBGEMM's fused lookup + optimizer
