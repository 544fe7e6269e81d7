"""The versions of torch, TorchRec and FBGEMM that this Recmill works with. They are built together."""

TORCH = "2.13.0"
TORCHREC = "1.8.0"
FBGEMM = "1.8.0"
