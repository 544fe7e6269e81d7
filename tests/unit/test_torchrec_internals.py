"""Every private name of TorchRec, FBGEMM and torch that we use, by name, and that one module alone uses them."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import Tensor, nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill.config.sections import TablesOptim
from recmill.errors import UserError
from recmill.kernels.library import load_library
from recmill.tables import torchrec_internals as internals
from recmill.tables.placement import Request
from recmill.tables.sharding import shard
from recmill.tables.spec import TableSpec
from recmill.tables.table_lookup import TableLookup
from recmill.world import World, joined_world

from ..dispatch import Counted

SOURCE = Path(internals.__file__).parents[1]
NAMES = [(owner, name) for owner, names in internals.PRIVATE_NAMES.items() for name in names]
META = torch.device("meta")
FEATURES = {"bag": "a", "bag_copy": "b", "rows": "a", "rows_copy": "b"}  # by table
TYPES = {table: "data_parallel" if table.endswith("copy") else "table_wise" for table in FEATURES}
IDS = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 3, 3, 0]), torch.tensor([1, 2, 0, 1]))


class Network(nn.Module):
    """Sums and sequences, each with a fused table and one that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            name: {"name": name, "num_embeddings": 5, "embedding_dim": 4, "feature_names": [feature]}
            for name, feature in FEATURES.items()
        }
        bags: list[Any] = [EmbeddingBagConfig(**shapes[name]) for name in ("bag", "bag_copy")]
        rows: list[Any] = [EmbeddingConfig(**shapes[name]) for name in ("rows", "rows_copy")]
        self.bags = EmbeddingBagCollection(device=META, tables=bags)
        self.rows = EmbeddingCollection(device=META, tables=rows)


def sharded(world: World, with_kernels: bool = False, **types: str) -> Any:
    tables = [TableSpec(name, feature, 5, 4, 0.1) for name, feature in FEATURES.items()]
    request = Request(tables, TYPES | types, "adagrad", 2, {"a": 2, "b": 2})
    library = load_library() if with_kernels else None
    return shard(Network(), request, TablesOptim(name="adagrad"), world, library).module


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined_world("cpu") as found:
        yield found


@pytest.fixture(scope="module")
def objects(world: World) -> list[object]:
    """One object of each class whose private names we use."""
    model = sharded(world)
    found: list[Any] = internals.sharded_collections(model)
    for collection in list(found):
        for group in internals.table_groups(collection):
            found += [group._group, getattr(group.module, "fbgemm", group.module)]
    found += [value for value in model.state_dict().values() if internals.is_sharded(value)]
    found += sharded(world, bag="row_wise").bags._embedding_shardings
    return [*found, model.rows(IDS), internals.FileSystemReader("")]


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[f"{owner.__name__}.{name}" for owner, name in NAMES])
def test_the_installed_libraries_have(owner: type, name: str, objects: list[object]) -> None:
    instances = [value for value in objects if isinstance(value, owner)]
    assert instances, f"the test has no {owner.__name__}"
    for instance in instances:
        getattr(instance, name)


def test_a_name_that_is_gone_is_reported_with_its_library_and_the_pinned_versions() -> None:
    owner = internals.ShardedEmbeddingBagCollection
    with pytest.raises(UserError) as caught:
        internals.check_libraries({owner: ("_lookups", "_gone")})
    assert str(caught.value) == (
        "The installed libraries do not work: ShardedEmbeddingBagCollection of torchrec has no attribute '_gone'. "
        "Recmill needs torch 2.13.0, torchrec 1.8.0 and fbgemm-gpu 1.8.0. Run: recmill doctor."
    )


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec, "__version__", "1.9.0")
    with pytest.raises(UserError, match=r"torchrec 1\.9\.0 is installed\. Recmill needs .*"):
        internals.check_libraries()


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("model.tables.embedding_bags.t1.weight", "t1"),
        ("tables.embeddings.item.weight", "item"),
        ("embeddings.item.weight", "item"),
        ("optim.state.tables.tables.embedding_bags.t1.weight.t1.momentum1", "t1"),
        ("model.bottom.0.weight", None),
        ("optim.state.dense.top.weight.exp_avg", None),
    ],
)
def test_the_table_of_a_key(key: str, table: str | None) -> None:
    assert internals.table_of(key) == table


def test_our_lookups_change_no_key_of_a_model_or_its_optimizer(world: World) -> None:
    """TorchRec's keys: checkpoints on disk have them."""
    tables = [TableSpec(name, feature, 5, 4, 0.1) for name, feature in FEATURES.items()]
    request = Request(tables, TYPES, "adagrad", 2, {"a": 2, "b": 2})
    model = shard(Network(), request, TablesOptim(name="adagrad"), world, load_library())
    weights = [f"bags.embedding_bags.{name}.weight" for name in ("bag", "bag_copy")]
    weights += [f"rows.embeddings.{name}.weight" for name in ("rows", "rows_copy")]
    assert sorted(model.state_dict()) == weights
    assert sorted(name for name, _ in model.named_parameters()) == weights
    states = model.fused_optimizer.state_dict()["state"]
    assert {key: list(state) for key, state in states.items()} == {
        weights[0]: ["bag.momentum1"],
        weights[2]: ["rows.momentum1"],
    }
    assert internals.replicated_tables(model.plan) == {"bag_copy", "rows_copy"}


def test_fused_tables_and_replicated_sequences_have_a_lookup_of_ours(world: World) -> None:
    found = {
        table.name: isinstance(group.module, TableLookup)
        for collection in internals.sharded_collections(sharded(world))
        for group in internals.table_groups(collection)
        for table in group._group._config.embedding_tables
    }
    assert found == {"bag": True, "bag_copy": False, "rows": True, "rows_copy": True}


def test_one_process_sums_rows_without_an_exchange_to_the_same_result(world: World) -> None:
    torchrecs, ours = (sharded(world, with_kernels, bag_copy="table_wise") for with_kernels in (False, True))
    for model in (torchrecs, ours):
        for _, part in internals.table_shards(model):
            part.values.detach().copy_(torch.arange(20.0).view(5, 4))
    expected, found = torchrecs.bags(IDS), ours.bags(IDS)
    assert isinstance(expected, LazyAwaitable)
    assert isinstance(found, KeyedTensor)
    assert found.keys() == expected.keys() == ["a", "b"]
    assert torch.equal(found.values(), expected.values())
    other_order = IDS.permute([1, 0])
    assert torch.equal(ours.bags(other_order).values(), expected.values())


def test_shards_are_copied_with_their_offsets(world: World) -> None:
    (value,) = [value for key, value in sharded(world).state_dict().items() if "embedding_bags.bag." in key]
    copy = internals.copy_to_cpu(value, lambda values: values + 1)
    assert internals.is_sharded(copy)
    (before,), (after,) = internals.local_shards(value), internals.local_shards(copy)
    assert (after.row, after.column) == (0, 0)
    assert torch.equal(after.values, before.values + 1)
    plain = internals.copy_to_cpu(torch.ones(2), lambda values: values * 2)
    assert isinstance(plain, Tensor)
    assert plain.tolist() == [2, 2]


def test_no_other_module_uses_private_names() -> None:
    """Attributes of anything but `self`, imports of private modules, and TorchRec's grammar of keys."""
    private = {name for _, name in NAMES} - {"weights", "optimizer"}  # words of others as well
    broken = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file == Path(internals.__file__):
            continue
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in private:
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                broken += [] if is_own else [f"{file}:{node.lineno}: .{node.attr}"]
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "fbgemm_gpu")):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                broken += [f"{file}:{node.lineno}: {part}" for part in parts if part.startswith("_")]
        broken += [f"{file}: {word}" for word in ("embedding_bags", "PHWithMeta", "ShardedTensor") if word in text]
    assert not broken, "\n".join(broken)


def test_ids_are_shifted_by_feature_without_waiting_for_a_gpu() -> None:
    """Two features of two rows, with 1 + 2 and 0 + 1 ids."""
    with Counted() as counted:
        shifted = internals.shifted_by_feature(
            torch.tensor([1, 3, 3, 0]), torch.tensor([0, 1, 3, 3, 4]), torch.tensor([0, 100])
        )
    assert shifted.tolist() == [1, 3, 3, 100]
    assert not counted.waits
