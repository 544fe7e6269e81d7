"""`device_mem`: every row in the memory of the process that holds it (RAM on CPU, HBM on a GPU).

A store names the compute kernels of TorchRec that its tables may use; `placement.make_plan` lets the planner choose
among them, and TorchRec then builds the FBGEMM modules that hold the rows. A store that keeps rows elsewhere also needs
its own estimate of memory (`placement._MemoryEstimator`), lookup (`table_lookup.TableLookup`), first values and
checkpoints.
"""

# FBGEMM's lookup with a fused optimizer; 'dense' is for data_parallel tables.
COMPUTE_KERNELS = ["fused", "dense"]
