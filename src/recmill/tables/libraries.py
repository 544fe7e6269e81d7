"""Import torch, FBGEMM and TorchRec in half the time that plain imports take.

TorchRec, FBGEMM, torch's DDP and, at their first step, torch's optimizers import torch's compiler and sympy. Recmill
needs neither, so stand-in modules provide the few attributes that are used. Access to any other attribute replaces
them with the real modules.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _same(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    return function


_KNOWN: dict[str, dict[str, Any]] = {
    "tensordict": {"TensorDict": type("TensorDict", (), {})},  # TorchRec asks whether an input is one
    "torch.fx.experimental.symbolic_shapes": {  # our shapes are numbers
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "statically_known_true"), bool),
        "GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (Exception,), {}),
    },
    "torch._dynamo": {"disable": _same, "graph_break": lambda: None},  # what must not be compiled
    "torch._dynamo.utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},
}


class _StandIn(ModuleType):
    """A module with the attributes in `_KNOWN`. Access to any other replaces all stand-ins with the real modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that inspects all of sys.modules
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


class _Submodules:
    """Finds and "loads" a submodule of a stand-in: the real one, which was imported for it."""

    path: Sequence[str] = ["a stand-in"]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if path is not self.path:
            return None
        _remove_stand_ins()
        return ModuleSpec(name, self, origin=importlib.import_module(name).__file__)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None: ...


def _install_stand_ins() -> None:
    sys.meta_path.insert(0, _SUBMODULES)
    for name, known in _KNOWN.items():
        package, _, last = name.rpartition(".")
        if name not in sys.modules:
            sys.modules[name] = stand_in = _StandIn(name)
            vars(stand_in).update(known, __path__=_SUBMODULES.path)
            if package:
                setattr(sys.modules[package], last, stand_in)


def _remove_stand_ins() -> None:
    for name in [name for name in _KNOWN if isinstance(sys.modules.get(name), _StandIn)]:
        del sys.modules[name]
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            delattr(sys.modules[package], last)


_SUBMODULES = _Submodules()


def import_libraries(in_own_process: bool) -> None:
    """Import the libraries. In a process of our own, the stand-ins stay, because torch imports more modules later."""
    if "recmill.tables.torchrec_internals" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()  # scanning the many objects that imports create would take a quarter of the time
    try:
        import torch.fx.experimental  # noqa: F401

        _install_stand_ins()
        from recmill.tables import torchrec_internals  # noqa: F401
    finally:
        if not in_own_process:
            _remove_stand_ins()
        if was_enabled:
            gc.enable()
