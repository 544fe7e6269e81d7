"""C++ kernels for CPU, used where torch's and FBGEMM's own are slow, and torch's counterparts elsewhere.

`library` compiles and loads them, `layers` says which layers of a network call them; `steps` and
`encoder` wrap them as differentiable functions.
"""
