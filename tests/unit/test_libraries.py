"""Imports without torch's compiler and sympy, and what happens when somebody needs them after all."""

import subprocess
import sys

BEGIN = """
import sys
from recmill.tables.libraries import import_libraries
import_libraries(in_own_process={own})
import torch, torchrec
HEAVY = {{"sympy", "torch._inductor", "torch._dynamo.eval_frame", "torch.distributed.tensor._api"}}
assert not HEAVY & sys.modules.keys(), HEAVY & sys.modules.keys()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5)
def step():
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_of_ours_trains_without_the_compiler_and_compiles_if_asked_to() -> None:
    run(
        BEGIN.format(own=True)
        + """
step()
assert weight.tolist() == [0.5, 0.5], weight
assert not HEAVY & sys.modules.keys()
compiled = torch.compile(lambda x: x * 2, backend="eager")  # imports a submodule of the stand-in first
assert compiled(torch.ones(1)).tolist() == [2.0]
assert HEAVY <= sys.modules.keys() | {"torch._inductor", "torch.distributed.tensor._api"}
import torch._dynamo.utils, torch._dynamo.backends.registry as registry, tensordict
assert torch.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),)).module()(torch.ones(1, 2)).shape == (1, 1)
from torch.distributed.tensor import DTensor
assert DTensor.from_local
from torch.fx.experimental.symbolic_shapes import ShapeEnv
assert registry is torch._dynamo.backends.registry is sys.modules["torch._dynamo.backends.registry"]
assert torch._dynamo is sys.modules["torch._dynamo"] and hasattr(torch._dynamo, "optimize")
assert tensordict.TensorDict({"a": torch.ones(1)}, []).sum()["a"] == 1
step()
assert weight.tolist() == [0.0, 0.0]
"""
    )


def test_another_program_s_process_keeps_no_stand_ins() -> None:
    run(
        BEGIN.format(own=False)
        + """
import torch._dynamo
assert hasattr(torch._dynamo, "__file__") and torch._dynamo.optimize
step()
"""
    )


def test_operators_on_device_meta_exist_once_all_is_imported() -> None:
    run(
        BEGIN.format(own=True)
        + """
from recmill.tables.libraries import import_all
matrix = torch.ones(3, 3, device="meta")
try:
    torch.roll(matrix, 1)  # torch has this one for "meta" in Python only
    raise SystemExit("the real module is imported already")
except NotImplementedError:
    import_all()
assert torch.roll(matrix, 1).shape == (3, 3)
"""
    )


def test_parts_of_torch_that_are_left_out_are_imported_when_they_are_used() -> None:
    run(
        BEGIN.format(own=True)
        + """
LEFT_OUT = {"torch.utils.data.dataloader", "torch.distributions.normal", "torch.distributed.elastic.agent"}
assert not LEFT_OUT & sys.modules.keys()
import torch.utils.data, torch.utils._python_dispatch
assert not torch.utils._python_dispatch.get_alias_info(torch.ops.aten.add.Tensor).outs[0].is_write  # uses torchgen
assert [*torch.utils.data.DataLoader([1, 2])][1].tolist() == [2]
assert torch.distributions.Normal(0.0, 1.0).cdf(torch.zeros(())) == 0.5
from torch.distributed.checkpoint._async_process_executor import _ProcessBasedAsyncCheckpointExecutor as executor
assert executor.execute_save
"""
    )


def test_libraries_that_are_imported_already_stay_as_they_are() -> None:
    run(
        """
import sys, torch, torchrec
before = sys.modules["torch._dynamo"], sys.modules["torch.fx.experimental.symbolic_shapes"], sys.modules["tensordict"]
from recmill.tables.libraries import import_libraries
import_libraries(in_own_process=True)
after = sys.modules["torch._dynamo"], sys.modules["torch.fx.experimental.symbolic_shapes"], sys.modules["tensordict"]
assert before == after and torch._dynamo.__file__
"""
    )


def test_inspection_of_frames_is_as_before_after_the_imports() -> None:
    run(
        """
import inspect
before = inspect.getmodule, inspect.getframeinfo
from recmill.tables.libraries import import_libraries
import_libraries(in_own_process=True)
assert before == (inspect.getmodule, inspect.getframeinfo)
"""
    )
