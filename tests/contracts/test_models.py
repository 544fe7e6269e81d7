"""What every registered model must do, on one device and on tiny data. Its task and its batch source come along."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from recmill import registry
from recmill.checkpoints.format import Position
from recmill.commands.assemble import build_sharded, build_source, task_module
from recmill.config import Config, load_config
from recmill.contracts import Broken, models
from recmill.data.opening import open_dataset
from recmill.kernels import products
from recmill.launch.watchdog import Heartbeat
from recmill.nn import dropout
from recmill.registry import load
from recmill.schema import Dataset
from recmill.training.meter import Meter
from recmill.training.optim import build_optimizer
from recmill.training.parts import Parts
from recmill.training.step import OverlappedStep, Step
from recmill.world import joined_world

from ..dispatch import Counted, OneDevice

every_model = pytest.mark.parametrize("name", sorted(registry.MODELS))


# Losses and layers that are not a model's defaults, for the checks of what a GPU would do.
VARIANTS: dict[str, dict[str, Any]] = {
    "bert4rec with window norms": {"norm": "window"},
    "bert4rec without seen items": {"exclude_seen": True},
    "sasrec with a tied head and smoothing": {"head": "tied", "label_smoothing": 0.1},
    "sasrec without seen items": {"head": "tied", "exclude_seen": True},
    "sasrec with gbce": {"loss": "gbce"},
    "sasrec with gbce and a tied head": {"loss": "gbce", "head": "tied"},
    "sasrec as esasrec": {"loss": "sampled_softmax", "head": "tied", "block": "ligr"},
    "dlrm with batch norm and dropout": {"batch_norm": True, "dropout": 0.2},
    "deepfm with batch norm and dropout": {"batch_norm": True, "dropout": 0.2},
}
REQUIRED: dict[str, dict[str, Any]] = {"two_tower": {"item_id": "C3"}}  # keys without a default
every_loss = pytest.mark.parametrize("name", [*sorted(registry.MODELS), *VARIANTS])


@pytest.fixture
def parts(name: str, clicks: Path, histories: Path) -> tuple[Config, Dataset]:
    """The model with its own defaults, on the kind of data that it learns from."""
    model = {"name": name.split()[0], **REQUIRED.get(name, {}), **VARIANTS.get(name, {})}
    module = registry.load(registry.MODELS, model["name"], "model")
    path = {"clicks": clicks, "histories": histories}[module.KIND]
    train = {"global_batch_size": 32, "kernels": "torch"}  # as on a GPU
    return load_config({"data": {"path": str(path)}, "model": model, "train": train}), open_dataset(path)


@every_model
@pytest.mark.parametrize("check", models.ON_ONE_DEVICE, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: models.Check, parts: tuple[Config, Dataset]) -> None:
    check(*parts)


@pytest.mark.parametrize("name", sorted(set(registry.MODELS) - {"bert4rec", "sasrec"}))
@pytest.mark.parametrize("check", models.ON_ONE_DEVICE, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_with_a_shared_table_padding_means_and_widths(
    check: models.Check, name: str, parts: tuple[Config, Dataset]
) -> None:
    config, dataset = parts
    padded = {"padding_id": 0}
    changes: dict[str, dict[str, Any]] = {"C1": padded, "C2": {"share_table": "C4"}, "C4": padded | {"pooling": "mean"}}
    if not config.model.needs_one_width:  # type: ignore[attr-defined]
        config = replace(config, model=config.model.model_copy(update={"embedding_dims": {"C3": 4}}))
    sparse = [feature.model_copy(update=changes.get(feature.name, {})) for feature in dataset.clicks.sparse]
    check(config, replace(dataset, description=dataset.clicks.model_copy(update={"sparse": sparse})))


def broken(module: ModuleType, **changes: Any) -> ModuleType:
    """Return a copy of a model's module with other functions."""
    copy = ModuleType("broken")
    copy.__dict__.update({**vars(module), **changes})
    return copy


def without_gradient(network: nn.Module) -> nn.Module:
    network.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    return network


def with_other_state(network: nn.Module) -> nn.Module:
    offset = torch.rand(())
    network.register_forward_hook(lambda *found: found[2] + offset)
    return network


def with_neighbours(network: nn.Module) -> nn.Module:
    network.register_forward_hook(lambda *found: found[2] + found[2].mean())
    return network


@pytest.mark.parametrize("name", ["dlrm"])
@pytest.mark.parametrize(
    ("change", "check", "expected"),
    [
        (without_gradient, models.the_loss_and_every_gradient_are_finite, "unused has no gradient"),
        (with_other_state, models.its_state_can_be_saved_and_loaded, "it lacks a part of the state"),
        (with_neighbours, models.padding_rows_change_no_gradient, "does a row depend on other rows"),
    ],
)
def test_a_model_that_breaks_the_contract_is_found(
    change: Callable[[nn.Module], nn.Module],
    check: models.Check,
    expected: str,
    parts: tuple[Config, Dataset],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = registry.load(registry.MODELS, "dlrm", "model")
    changed = broken(module, build=lambda *arguments: change(module.build(*arguments)))
    monkeypatch.setattr(
        registry, "load", lambda names, name, what: changed if what == "model" else load(names, name, what)
    )
    with pytest.raises(Broken, match=expected):
        check(*parts)


@every_loss
def test_forward_and_backward_stay_on_their_device_and_read_nothing_from_it(
    parts: tuple[Config, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, which has no values: whatever makes the host wait for a GPU is an error there."""
    config, dataset = parts
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it does not know this device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    meta = torch.device("meta")
    network, batch = models.build(config, dataset).to(meta), models.first_batch(config, dataset).to(meta)
    ranked = next(build_source(config, dataset, rank=0, size=1).eval_batches("val")).to(meta)
    with OneDevice():
        loss = task_module(config).loss_sum(network, batch)
        loss.backward()
        with torch.no_grad():
            assert network.eval()(*ranked.inputs()).device == meta
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device == meta, name


# The most kernels that a step of each model may start, with its optimizers and the sums for the reports. A new model
# adds its number. Each further kernel costs a GPU 5 to 10 microseconds.
MOST_KERNELS = {"dlrm": 62, "dcnv2": 95, "projection": 83, "bert4rec": 203, "sasrec": 203} | {
    **{"logistic": 31, "fm": 54, "deepfm": 71, "finalmlp": 109, "two_tower": 102},
    "bert4rec with window norms": 246,
    "sasrec with a tied head and smoothing": 211,
    "bert4rec without seen items": 223,
    "sasrec without seen items": 228,
    "sasrec with gbce": 221,
    "sasrec with gbce and a tied head": 221,
    "sasrec as esasrec": 262,
    "dlrm with batch norm and dropout": 110,
    "deepfm with batch norm and dropout": 111,
}


CLICK_MODELS = [name for name in sorted(registry.MODELS) if registry.load(registry.MODELS, name, "").KIND == "clicks"]
EVERY_STEP = [(name, "plain") for name in MOST_KERNELS] + [
    (name, "overlapped") for name in (*CLICK_MODELS, *VARIANTS) if name.split()[0] in CLICK_MODELS
]


@pytest.mark.parametrize(("name", "way"), EVERY_STEP)
def test_no_step_waits_for_the_gpu_or_starts_many_kernels(
    name: str, way: str, parts: tuple[Config, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step: at the first one TorchRec checks its input. FBGEMM reads its step counter, which is on CPU.

    TorchRec's pipeline reads how many ids the ranks exchange, for a batch that is not in use yet.
    """
    config, dataset = parts
    monkeypatch.setattr(dropout, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(dropout, "_fused", lambda *_: lambda x, *counters: 2 * x)  # one kernel, as the compiled one
    monkeypatch.setattr(products, "_prefers_onednn", lambda: False)  # which is for CPUs
    settings = config.settings
    with joined_world("cpu") as world:
        model = build_sharded(config, dataset, world)
        optimizer = build_optimizer(model, settings.optim)
        source = build_source(config, dataset, 0, 1)
        its_parts = Parts(model, task_module(config), source, world, 0, Heartbeat())
        step = Step(its_parts, optimizer, settings.train, settings.optim.dense, Position())
        meter = Meter(model, world, Position())
        batches, ahead = itertools.tee(source.train_batches(0, 0))
        take_step = OverlappedStep(step, iter([ahead])) if way == "overlapped" else step
        for batch in itertools.islice(batches, 3):
            weight = batch.weight()
            with Counted() as counted:
                meter.add(take_step(batch, 1 / weight), weight, 32)
    waiting = {package for package, _ in counted.waits}
    assert waiting == ({"fbgemm_gpu", "torchrec"} if way == "overlapped" else {"fbgemm_gpu"}), counted.waits
    assert MOST_KERNELS.keys() == {*registry.MODELS, *VARIANTS}
    of_exchange = 3 if way == "overlapped" else 0
    assert counted.kernels.total() <= MOST_KERNELS[name] + of_exchange, counted.kernels
