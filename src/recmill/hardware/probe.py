"""Multiply in bfloat16 or float16, compare with float32 and time both: `python -m recmill.hardware.probe DTYPE`.

Prints one line of JSON: {"ratio": float32 seconds / DTYPE seconds} or {"problem": what happened}.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from recmill.failpoints import reach

# Relative to the norm of the float32 result. Correct results differ by 0.005 (bfloat16) and 0.0006 (float16).
_TOLERANCE = {"bfloat16": 0.03, "float16": 0.01}
_REPEATS = 10
_MAX_SECONDS = 1.0  # a CPU without instructions for the dtype takes 100 times as long, and needs fewer repeats


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the result of a function, and the gradient of each of its inputs."""
    leaves = [value.requires_grad_() for value in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype))]


def _all_products() -> list[Tensor]:
    """Compute the products of models: layers of two sizes, attention, pair products. oneDNN has code for each."""
    torch.manual_seed(1)
    return [
        *_with_gradients(functional.linear, torch.randn(1024, 512), torch.randn(512, 512), torch.randn(512)),
        *_with_gradients(functional.linear, torch.randn(25, 13), torch.randn(7, 13), torch.randn(7)),
        *_with_gradients(functional.scaled_dot_product_attention, *torch.randn(3, 3, 2, 200, 32)),
        *_with_gradients(lambda x: torch.bmm(x, x.transpose(1, 2)), torch.randn(9, 27, 16)),
    ]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.float() - expected).norm() / expected.norm()).nan_to_num(nan=float("inf")))


def _seconds(dtype: torch.dtype) -> float:
    """Return the least time that a large layer takes."""
    x = torch.randn(1024, 512, requires_grad=True)
    weight = torch.randn(512, 512, requires_grad=True)
    best = float("inf")
    began = time.perf_counter()
    for _ in range(_REPEATS):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = functional.linear(x, weight)
        torch.autograd.grad(out, [x, weight], out.detach())
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - began > _MAX_SECONDS:
            break
    return best


def measure(name: str) -> dict[str, float | str]:
    """Return the answer as a mapping; an instruction that faults ends this process instead."""
    dtype: torch.dtype = getattr(torch, name)
    try:
        reach("probe.lowered" if "ONEDNN_MAX_CPU_ISA" in os.environ else "probe.all_features")
        expected = _all_products()
        with torch.autocast("cpu", dtype):
            found = _all_products()
        error = max(_relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        if error > _TOLERANCE[name]:
            return {"problem": f"gives wrong products (relative error {error:.2g})"}
        return {"ratio": _seconds(torch.float32) / _seconds(dtype)}
    except RuntimeError as error:
        return {"problem": f"fails ({str(error).splitlines()[0]})"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1])) + "\n")
