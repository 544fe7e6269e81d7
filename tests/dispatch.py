"""What a GPU would do, seen without one: where tensors are, kernels started, and waits of the host for the GPU."""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators whose result the host has to know, so that it waits for the GPU.
WAITING = {
    *("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "bincount", "histc"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense"}
PACKAGES = ("fbgemm_gpu", "torchrec", "recmill")


class OneDevice(TorchDispatchMode):
    """Raise where an operator of a network on the meta device takes or makes a tensor elsewhere.

    A number may be on CPU: kernels get it as an argument.
    """

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        elsewhere = {str(tensor.device) for tensor in tensors if tensor.dim() and tensor.numel()} - {"meta"}
        assert not elsewhere, f"{operator} has a tensor on {elsewhere}"
        return result


class Counted(TorchDispatchMode):
    """Count the operators that start a kernel, and by package and operator those for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self._reads = _Reads(self.waits)

    def __enter__(self) -> "Counted":
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name.split("::")[1]
        if _waits(name, args, kwargs):
            self.waits[_package(), name] += 1
        if not operator.is_view and name not in WITHOUT_KERNEL and "record_function" not in name:
            self.kernels[name] += 1
        return result


class _Reads(TorchFunctionMode):
    """Count methods that read a tensor without any operator if it is on CPU."""

    def __init__(self, waits: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self._waits[_package(), function.__name__] += 1
        return function(*args, **(kwargs or {}))


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(args[1]))
    return name in WAITING


def _package() -> str:
    """Return the package whose code is running: the innermost of `PACKAGES` on the stack."""
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        parts = frame.f_code.co_filename.split("/")
        if found := [package for package in PACKAGES if package in parts]:
            return found[0]
    return "tests"
