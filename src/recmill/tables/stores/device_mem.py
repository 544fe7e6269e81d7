"""`device_mem`: every row in the memory of the process that holds it (RAM on CPU, HBM on a GPU).

A store lists the compute kernels that TorchRec's planner may choose from. One that keeps rows elsewhere also needs its
own memory estimate (`placement._MemoryEstimator`), lookup (`table_lookup.TableLookup`), first values and checkpoints.
"""

# FBGEMM's lookup with a fused optimizer; 'dense' is for data_parallel tables.
COMPUTE_KERNELS = ["fused", "dense"]
