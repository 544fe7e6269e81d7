"""Check kernels of a compiled library against known results: `python -m recmill.kernels.trial LIBRARY`.

An instruction that the hypervisor lacks kills this process, which does not import torch.
"""

import ctypes
import math
import sys
from ctypes import c_float, c_int64

from recmill.failpoints import reach

_ROWS = 50
_DIM = 64


def main(path: str) -> None:
    reach("probe.kernel")
    library = ctypes.CDLL(path)
    rows, dim = c_int64(_ROWS), c_int64(_DIM)

    values = _array(_ROWS * _DIM, 2.0)
    library.add_bias_relu(values, _array(_DIM, -0.5), rows, dim)
    assert set(values) == {1.5}

    out = _array(_ROWS * (_DIM + 3))
    bags = _array(_ROWS * 2 * _DIM, 1.0)
    library.pair_products(_array(_ROWS * _DIM, 2.0), bags, rows, c_int64(3), dim, c_int64(0), c_int64(_DIM + 3), out)
    assert list(out)[_DIM : _DIM + 3] == [2.0 * _DIM, 2.0 * _DIM, _DIM]

    num_items = 100
    losses = _array(_ROWS)
    gradients = [_array(size) for size in (_ROWS * _DIM, num_items * _DIM, num_items)]
    queries, items, bias = _array(_ROWS * _DIM), _array(num_items * _DIM, 1.0), _array(num_items)
    inputs = [queries, items, bias, (c_int64 * _ROWS)(), _array(_ROWS, 1.0)]
    sizes, nothing_seen = [rows, c_int64(num_items), dim], [None, None, None]
    library.catalogue_loss(*inputs, *sizes, c_float(0.0), *nothing_seen, losses, *gradients)
    assert all(math.isclose(loss, math.log(num_items), rel_tol=1e-4) for loss in losses), losses[0]


def _array(size: int, value: float = 0.0) -> "ctypes.Array[c_float]":
    return (c_float * size)(*[value] * size)


if __name__ == "__main__":
    main(sys.argv[1])
