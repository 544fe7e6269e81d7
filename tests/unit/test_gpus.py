"""What a GPU would show, checked with stand-ins: no test here, or anywhere, has ever run on a GPU."""

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed import embeddingbag, model_parallel
from torchrec.distributed.types import ShardingPlan

from recmill import world as world_module
from recmill.checkpoints import saver as saver_module
from recmill.checkpoints.format import Position
from recmill.commands import assemble
from recmill.commands.assemble import build_sharded, open_matching_dataset
from recmill.config import load_config
from recmill.environment import ProcessEnvironment
from recmill.errors import ConfigError, ResourceError
from recmill.tables import sharding
from recmill.tables import torchrec_internals as internals
from recmill.tables.placement import Catalogue, Machines, make_plan
from recmill.training.prefetch import pinned, prefetched
from recmill.world import World, check_own_gpus, choose_device, joined_world

from ..checkpoints import new_saver, newest_in

META = torch.device("meta")
GPU_1 = torch.device("cuda", 1)


class Replicas(nn.Module):
    """Stands for DDP, which wants to read the values of its parameters."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(**options: Any) -> None: ...


def plan_for_gpus(network: nn.Module, sharders: list[Any], request: Any, world: World) -> tuple[ShardingPlan, Any]:
    """Plan for a GPU of rank 0, and place the shards on 'meta' instead."""
    plan = make_plan(network, sharders, request, Machines(1, 1, "cuda", 10**10))
    internals.place_on(plan, [META])
    return plan, {}


@pytest.fixture
def group_of() -> Iterator[Callable[[int], None]]:
    """Be rank 0 of a group whose other ranks do not exist."""
    yield lambda size: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("model", ["dlrm", "dcnv2", "projection", "bert4rec", "sasrec"])
def test_every_parameter_and_buffer_is_on_the_world_s_device(
    model: str, size: int, request: pytest.FixtureRequest, group_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is 'meta', on which the dense layers, like on a GPU, are not built."""
    group_of(size)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own, **options: operator.setitem(found, 0, own))
    for module in (model_parallel, embeddingbag):
        monkeypatch.setattr(module, "DistributedDataParallel", Replicas)
    monkeypatch.setattr(sharding, "_plan_on_rank_0", plan_for_gpus)
    values = request.getfixturevalue(model)
    values["train"].pop("device")
    config = load_config(values)
    built = build_sharded(config, open_matching_dataset(config), World(0, size, 0, size, META))
    tensors = dict(built.named_parameters()) | dict(built.named_buffers())
    tensors |= {f"rows of {table}": shard.values for table, shard in internals.table_shards(built)}
    assert len(tensors) > 5
    elsewhere = {name: value.device for name, value in tensors.items() if value.device != META}
    assert not elsewhere


@pytest.mark.parametrize(
    ("model", "catalogue"),
    [
        ("bert4rec", Catalogue(200, 32, is_tied=False)),
        ("sasrec", Catalogue(200, 32, is_tied=True)),
        ("gsasrec", None),  # looks up a sample
        ("dlrm", None),
    ],
)
def test_the_planner_knows_which_items_a_step_scores(
    model: str, catalogue: Catalogue | None, request: pytest.FixtureRequest
) -> None:
    config = load_config(request.getfixturevalue(model))
    assert assemble._catalogue(config, open_matching_dataset(config)) == catalogue


def test_tables_are_planned_for_the_memory_that_is_free(dlrm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may use most of a GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 80 * 10**9))
    config = load_config(dlrm)
    with pytest.raises(ResourceError, match=r"can use 0\.1 MB \(90% of the free memory of its GPU\)"):
        build_sharded(config, open_matching_dataset(config), World(0, 1, 0, 1, GPU_1))


def test_shards_are_placed_on_the_gpus_that_processes_see(
    dlrm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler shows each of four processes one GPU, which is number 0 for all of them."""
    dlrm["sharding"] = {"default": "row_wise"}
    config = load_config(dlrm)
    plans: list[ShardingPlan] = []

    def broadcast(world: World, planned: tuple[ShardingPlan, Any]) -> tuple[ShardingPlan, Any]:
        plans.append(planned[0])
        return planned

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**10, 10**10))
    monkeypatch.setattr(World, "gather", lambda world, value: [value] * world.size)
    monkeypatch.setattr(World, "broadcast", broadcast)
    monkeypatch.setattr(sharding, "DistributedModelParallel", lambda *_, **options: nn.Identity())
    build_sharded(config, open_matching_dataset(config), World(0, 4, 0, 4, torch.device("cuda", 0)))
    (plan,) = plans
    found = {str(shard.placement) for table in plan.plan["tables"].values() for shard in table.sharding_spec.shards}
    assert found == {f"rank:{rank}/cuda:0" for rank in range(4)}


class Devices:
    """Stands for torch.cuda: each thread has its own current GPU, at first number 0."""

    def __init__(self) -> None:
        self._own = threading.local()
        self.used: list[tuple[str, int]] = []  # by which thread, which GPU

    def set_device(self, device: torch.device) -> None:
        self._own.index = device.index

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def current_stream(self) -> Any:
        self.used.append((threading.current_thread().name.split("_")[0], getattr(self._own, "index", 0)))
        return SimpleNamespace(synchronize=lambda: None, wait_stream=lambda stream: None, device_type="cuda")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(filesystem, "_get_device_module", lambda kind: found)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("device", "used"), [(GPU_1, {("saving", 1)}), (torch.device("cpu"), set())])
def test_the_thread_that_saves_uses_no_gpu_but_its_own(
    device: torch.device,
    used: set[tuple[str, int]],
    background: bool,
    devices: Devices,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default torch.distributed.checkpoint waits for the stream of its thread's GPU, whatever it copies."""

    def checked(values: Tensor) -> bool:
        if device.type == "cuda":
            devices.current_stream()  # as every operation on a GPU does
        return True

    monkeypatch.setattr(saver_module, "is_finite", checked)
    saver = new_saver(tmp_path, nn.Linear(2, 2), background=background)
    saver.world = World(0, 1, 1, 1, device)
    saver.save(Position(step=1))
    saver.finish()
    assert newest_in(tmp_path).position.step == 1
    assert set(devices.used) == used


class PinnedBatch:
    def __init__(self, devices: Devices) -> None:
        self.devices = devices

    def pin_memory(self) -> "PinnedBatch":
        self.devices.current_stream()
        return self


@pytest.mark.parametrize(("ahead", "thread"), [(0, "MainThread"), (2, "prefetch")])
def test_the_thread_that_pins_batches_does_so_for_its_own_gpu(ahead: int, thread: str, devices: Devices) -> None:
    batches: Any = iter([PinnedBatch(devices)] * 3)
    with prefetched(pinned(batches, GPU_1), ahead) as ready:
        assert len(list(ready)) == 3
    assert devices.used == [(thread, 1)] * 3


def process(rank: int = 0, local_rank: int | None = None, launcher: int | None = None) -> ProcessEnvironment:
    own = rank if local_rank is None else local_rank  # as `process_environment` reads it
    return ProcessEnvironment("torchrun", rank, 16, own, 16, 0, None, launcher)


@pytest.mark.parametrize(
    ("wanted", "own", "gpus", "has_kernels", "device"),
    [
        ("cpu", process(), 8, True, "cpu"),
        ("auto", process(), 0, False, "cpu"),
        ("auto", process(), 0, True, "cpu"),
        ("auto", process(3), 8, False, "cpu"),  # torch for CUDA with FBGEMM for CPU
        ("auto", process(3), 8, True, "cuda:3"),
        ("cuda", process(11, local_rank=3), 8, True, "cuda:3"),
        ("cuda", process(11, local_rank=3), 1, True, "cuda:0"),  # srun --gpus-per-task=1
        ("cuda", process(0, launcher=7), 1, True, "cuda:0"),
    ],
)
def test_each_process_gets_a_device(
    wanted: str, own: ProcessEnvironment, gpus: int, has_kernels: bool, device: str
) -> None:
    assert choose_device(wanted, own, gpus, has_kernels) == torch.device(device)


@pytest.mark.parametrize(
    ("wanted", "own", "gpus", "has_kernels", "message"),
    [
        ("cuda", process(), 0, True, "train.device = 'cuda', but torch sees no GPU here"),
        ("cuda", process(), 8, False, "the installed FBGEMM is built for CPU and cannot use GPUs"),
        ("auto", process(9), 8, True, "Process 9 is number 9 on its machine, .* but 8 GPU"),
        ("cuda", process(2, local_rank=2), 2, True, "Process 2 is number 2 .* set CUDA_VISIBLE_DEVICES"),
        ("auto", process(1, launcher=7), 1, True, "Process 1 .* each process needs its own. Start fewer processes"),
    ],
)
def test_a_process_without_a_gpu_of_its_own_is_an_error_in_the_config(
    wanted: str, own: ProcessEnvironment, gpus: int, has_kernels: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device(wanted, own, gpus, has_kernels)


def test_two_ranks_on_one_gpu_are_named() -> None:
    check_own_gpus(["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"Ranks 1 and 3 use the same GPU \(b\)"):
        check_own_gpus(["a", "b", "c", "b"])


@pytest.mark.parametrize(
    ("variant", "kind", "logged"),
    [("cuda", "cuda", ""), ("cpu", "cpu", "8 GPU(s) are not used: the installed FBGEMM is built for CPU")],
)
def test_auto_uses_gpus_only_with_an_fbgemm_that_can(
    variant: str, kind: str, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("fbgemm_gpu.__variant__", variant)
    assert world_module._device("auto", process()).type == kind
    assert caplog.messages[0].startswith(logged) if logged else not caplog.messages


@pytest.mark.parametrize(("device", "is_destroyed"), [("cpu", True), ("cuda:1", False)])
def test_after_an_error_nobody_waits_for_nccl_to_shut_down(
    device: str, is_destroyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[bool] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    monkeypatch.setattr(world_module, "join_world", lambda *_: World(0, 1, 0, 1, torch.device(device)))
    with pytest.raises(ZeroDivisionError), joined_world("auto"):
        raise ZeroDivisionError
    assert bool(destroyed) is is_destroyed
    with joined_world("auto"):
        pass
    assert len(destroyed) == 1 + is_destroyed
