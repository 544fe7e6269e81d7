"""Import torch, FBGEMM and TorchRec in less than half the time that plain imports take.

TorchRec, FBGEMM, torch's DDP and, at their first step, torch's optimizers import torch's compiler and sympy; TorchRec
and torch's checkpoints import DTensor and FSDP. Recmill needs none of them, so stand-in modules provide the few
attributes that are used. Access to any other attribute replaces them with the real modules.
"""

import contextlib
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def _same(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    return function


def _classes(*names: str) -> dict[str, Any]:
    """Return empty classes: nothing is an instance of them."""
    return {name: type(name, (), {}) for name in names}


_DTENSOR = _classes("DTensor", "DeviceMesh", "Placement", "Replicate", "Shard", "_DTensorSpec", "distribute_tensor")
_FSDP = _classes(
    *("FullyShardedDataParallel", "StateDictType", "StateDictConfig", "FullStateDictConfig", "ShardedStateDictConfig"),
    *("OptimStateDictConfig", "FullOptimStateDictConfig", "ShardedOptimStateDictConfig"),
)
_KNOWN: dict[str, dict[str, Any]] = {
    "tensordict": {"TensorDict": type("TensorDict", (), {})},  # TorchRec asks whether an input is one
    "torch.fx.experimental.symbolic_shapes": {  # our shapes are numbers
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "statically_known_true"), bool),
        "GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (Exception,), {}),
    },
    "torch._dynamo": {
        **{"disable": _same, "graph_break": lambda: None},  # what must not be compiled
        "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
    },
    "torch._dynamo.utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},
    "torch.distributed.tensor": _DTENSOR,
    "torch.distributed.tensor._utils": {"compute_local_shape_and_global_offset": None},
    "torch.distributed._tensor": _DTENSOR,
    "torch.distributed._tensor.api": _DTENSOR,
    "torch.distributed._tensor.placement_types": _DTENSOR,
    "torch.distributed.fsdp": _FSDP,
    "torch.distributed.fsdp._common_utils": dict.fromkeys(
        ("FSDP_WRAPPED_MODULE", "_get_module_fsdp_state_if_fully_sharded_module")
    ),
    "torch.distributed.fsdp._init_utils": {"HYBRID_SHARDING_STRATEGIES": ()},
    "torch.distributed.fsdp._shard_utils": {"_create_chunk_sharded_tensor": None},
    "torch.distributed.checkpoint._async_process_executor": _classes("_ProcessBasedAsyncCheckpointExecutor"),
    "torch.distributed._composable.fsdp": {},
    "torch.distributed._composable.fsdp.fully_shard": _classes("FSDPModule"),
}
# torch itself imports these: what operators do on device "meta", in Python, the export of programs, data loaders, ...
_OF_TORCH: dict[str, dict[str, Any]] = {
    "torch._meta_registrations": {},
    "torch.distributions": {},
    "torch.export": {},
    "torch.masked": {},
    "torch.nn.intrinsic": {},
    "torch.quantization": _classes("PlaceholderObserver", "QConfig"),  # for TorchRec's type hints
    "torch.utils.data": {},
    "torchgen.model": {},
}


class _StandIn(ModuleType):
    """A module with the attributes in `_KNOWN`. Access to any other replaces all stand-ins with the real modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that inspects all of sys.modules
            raise AttributeError(name)
        import_all()
        return getattr(importlib.import_module(self.__name__), name)


class _Submodules:
    """Finds and "loads" a submodule of a stand-in: the real one, which was imported for it."""

    path: Sequence[str] = ["a stand-in"]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if path is not self.path:
            return None
        import_all()
        return ModuleSpec(name, self, origin=importlib.import_module(name).__file__)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None: ...


def _install_stand_ins(modules: dict[str, dict[str, Any]]) -> None:
    for name, known in modules.items():
        package, _, last = name.rpartition(".")
        if name not in sys.modules:
            sys.modules[name] = stand_in = _StandIn(name)
            vars(stand_in).update(known, __path__=_SUBMODULES.path)
            if package in sys.modules:
                setattr(sys.modules[package], last, stand_in)


def import_all() -> None:
    """Replace all stand-ins with the real modules, which are imported when they are used; those of torch at once."""
    removed = [name for name in _KNOWN | _OF_TORCH if isinstance(sys.modules.get(name), _StandIn)]
    for name in removed:
        del sys.modules[name]
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(last, None)
    for name in _OF_TORCH.keys() & removed:
        importlib.import_module(name)


@contextlib.contextmanager
def _quick_inspection() -> Iterator[None]:
    """Find the module and the line of a frame without searching all modules and reading files, as `inspect` does.

    torch asks for both when an operator is registered.
    """
    find_module, describe = inspect.getmodule, inspect.getframeinfo

    def getmodule(object: Any, _filename: str | None = None) -> ModuleType | None:
        is_frame = inspect.isframe(object)
        return sys.modules.get(object.f_globals["__name__"]) if is_frame else find_module(object, _filename)

    inspect.getmodule = getmodule
    inspect.getframeinfo = lambda frame, context=0: describe(frame, context)
    try:
        yield
    finally:
        inspect.getmodule, inspect.getframeinfo = find_module, describe


_SUBMODULES = _Submodules()


def import_libraries(in_own_process: bool) -> None:
    """Import the libraries. In a process of our own, the stand-ins stay, because torch imports more modules later."""
    if "recmill.tables.torchrec_internals" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.disable()  # scanning the many objects that imports create would take a quarter of the time
    sys.meta_path.insert(0, _SUBMODULES)
    try:
        with _quick_inspection():
            importlib.import_module("torchgen")  # so that it gets the stand-in of its submodule as an attribute
            if in_own_process and "torch" not in sys.modules:
                _install_stand_ins(_OF_TORCH)
            import torch.fx.experimental  # noqa: F401

            _install_stand_ins(_KNOWN)
            from recmill.tables import torchrec_internals  # noqa: F401
    finally:
        if not in_own_process:
            import_all()
        if was_enabled:
            gc.enable()
