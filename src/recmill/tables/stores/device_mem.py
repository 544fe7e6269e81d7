"""`device_mem`: every row in the memory of the process that owns it (RAM on CPU, HBM on a GPU)."""

# What TorchRec's planner may choose from: FBGEMM's fused lookup + optimizer; 'dense' is for data_parallel tables.
COMPUTE_KERNELS = ["fused", "dense"]
