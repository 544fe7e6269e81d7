from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from recmill import batch as module
from recmill.batch import CtrBatch, RankingBatch, SequenceBatch
from recmill.commands.assemble import build_source
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.protocols import Batch

Config = dict[str, Any]

CPU, META = torch.device("cpu"), torch.device("meta")
BATCHES = [value for value in vars(module).values() if isinstance(value, type) and hasattr(value, "inputs")]


def test_batches_move_with_all_their_fields_and_stay_as_they_are_on_their_device(
    dlrm: Config, bert4rec: Config
) -> None:
    batches: list[Batch] = []
    dlrm["model"]["dropout"] = 0.1
    for values in (dlrm, bert4rec):
        config = load_config(values)
        source = build_source(config, open_dataset(config.settings.data.path), 0, 1)
        batches += [next(source.train_batches(0, 0)), next(source.eval_batches("val"))]
    assert [type(batch) for batch in batches] == [CtrBatch, CtrBatch, SequenceBatch, RankingBatch]
    for batch in batches:
        assert batch.to(CPU, non_blocking=True) is batch
        moved = batch.to(META, non_blocking=True)
        assert type(moved) is type(batch)
        assert moved.to(META) is moved
        tensors = {name: value for name, value in vars(moved).items() if isinstance(value, Tensor)}
        assert {value.device for value in tensors.values()} == {META}
        others = vars(moved).keys() - tensors.keys()
        if isinstance(moved, CtrBatch):
            unused = {"row_keys_B"} if batch is batches[1] else {"numbers_B"}  # of evaluations and of training
            assert others == {"sparse", "groups_B"} | unused
            assert moved.sparse.values().device == moved.sparse.lengths().device == META
        else:
            assert {name: getattr(moved, name) for name in others} == {"longest": batch.lengths_B.max().item()}  # type: ignore[attr-defined]


class Recorder(Tensor):
    """Stands in for a field, and records which methods a batch calls."""

    calls: list[Any]

    def to(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append(("to", *arguments, options))
        return "moved"

    def pin_memory(self) -> Any:  # type: ignore[override]
        self.calls.append("pin_memory")
        return "pinned"

    def record_stream(self, stream: Any) -> None:
        self.calls.append(("record_stream", stream))


@pytest.mark.parametrize("kind", BATCHES)
def test_moving_pinning_and_recording_reach_every_field(kind: type[Any]) -> None:
    """TorchRec's pipeline depends on it: a field without its stream may be overwritten while it is in use."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        values[field.name] = 7 if field.type is int else torch.empty(0, device="meta").as_subclass(Recorder)
        if field.type is not int:
            values[field.name].calls = []
    batch = kind(**values)
    moved, pinned = batch.to(CPU, non_blocking=True), batch.pin_memory()
    batch.record_stream("a stream")
    expected = [("to", CPU, {"non_blocking": True}), "pin_memory", ("record_stream", "a stream")]
    for name, value in values.items():
        if isinstance(value, int):
            assert getattr(moved, name) == getattr(pinned, name) == 7
        else:
            assert value.calls == expected, name
            assert (getattr(moved, name), getattr(pinned, name)) == ("moved", "pinned")


def test_every_kind_of_batch_is_checked_above() -> None:
    kinds = ["CtrBatch", "RetrievalBatch", "RequestBatch", "ItemBatch", "SequenceBatch", "RankingBatch"]
    assert [kind.__name__ for kind in BATCHES] == kinds
