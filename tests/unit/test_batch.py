from typing import Any

import torch

from recmill.batch import CtrBatch, RankingBatch, SequenceBatch
from recmill.commands.assemble import build_source
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.protocols import Batch

Config = dict[str, Any]


def test_batches_move_with_all_their_fields_and_stay_as_they_are_on_cpu(dlrm: Config, bert4rec: Config) -> None:
    batches: list[Batch] = []
    for values in (dlrm, bert4rec):
        config = load_config(values)
        source = build_source(config, open_dataset(config.settings.data.path), 0, 1)
        batches += [next(source.train_batches(0, 0)), next(source.eval_batches("val"))]
    assert [type(batch) for batch in batches] == [CtrBatch, CtrBatch, SequenceBatch, RankingBatch]
    for batch in batches:
        assert batch.to(torch.device("cpu"), non_blocking=True) is batch
        moved = batch.to(torch.device("meta"), non_blocking=True)
        assert type(moved) is type(batch)
        assert {getattr(moved, name).device.type if name != "sparse" else "meta" for name in vars(batch)} == {"meta"}
        if isinstance(moved, CtrBatch):
            assert moved.sparse.values().device.type == moved.sparse.lengths().device.type == "meta"
