"""Batches for retrieval, and what two towers compute from them."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recmill import evaluate, train, write_items
from recmill.commands.assemble import (
    build_source,
    model_module,
    open_matching_dataset,
    open_trained_run,
    task_module,
    unsharded_network,
)
from recmill.config import Config, load_config
from recmill.data.click_rows import concatenate
from recmill.data.clicks import SplitRows
from recmill.data.opening import open_dataset
from recmill.data.retrieval import RetrievalSource
from recmill.errors import ConfigError
from recmill.schema import Dataset


def parts(clicks: Path, **model: Any) -> tuple[Config, Dataset]:
    given = {"name": "two_tower", "item_id": "C2", "item_features": ["C3", "I2"], **model}
    values = {"data": {"path": str(clicks)}, "model": given, "train": {"global_batch_size": 64}}
    return load_config(values), open_dataset(clicks)


def source_of(clicks: Path, rank: int = 0, size: int = 1) -> RetrievalSource:
    source = build_source(*parts(clicks), rank=rank, size=size)
    assert isinstance(source, RetrievalSource)
    return source


def rows_of(clicks: Path, split: str) -> Any:
    rows = SplitRows(open_dataset(clicks), split)
    return rows.take(np.arange(len(rows)))


def test_an_epoch_has_every_clicked_row_once_and_the_items_of_its_batches(clicks: Path) -> None:
    stored = rows_of(clicks, "train")
    clicked = stored.ids[stored.labels == 1]
    shares = clicked[:, 1].tolist()
    found = []
    for batch in source_of(clicks).train_batches(0, 0):
        num_items = len(batch.log_inclusion_C)
        lengths = batch.sparse.lengths().view(4, -1)
        assert lengths[[0, 3], : batch.num_requests].eq(1).all() and lengths[[1, 2], : batch.num_requests].eq(0).all()
        assert lengths[[1, 2], batch.num_requests :].eq(1).all() and lengths[[0, 3], batch.num_requests :].eq(0).all()
        ids = dict(zip(batch.sparse.keys(), batch.sparse.values().split(batch.sparse.length_per_key()), strict=True))
        items = ids["C2"]
        assert len(items) == num_items == len(items.unique())
        assert set(items[batch.answers_R].tolist()) == set(items.tolist())
        for item, log_inclusion in zip(items.tolist(), batch.log_inclusion_C.tolist(), strict=True):
            absent = (1 - shares.count(item) / len(shares)) ** batch.num_requests  # from all draws of a batch
            assert np.exp(log_inclusion) == pytest.approx(1 - absent, rel=1e-4)
        found += list(zip(ids["C1"].tolist(), items[batch.answers_R].tolist(), ids["C4"].tolist(), strict=True))
    assert sorted(found) == sorted(map(tuple, clicked[:, [0, 1, 3]].tolist()))


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_ranks_every_clicked_row_among_all_items_up_to_its_split(
    split: str, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = {"val": ("train", "val"), "test": ("train", "val", "test")}[split]
    every = {item for known in read for item in rows_of(clicks, known).ids[:, 1].tolist()}
    stored = rows_of(clicks, split)
    monkeypatch.setattr("recmill.data.retrieval._ITEMS_AT_ONCE", 20)
    *blocks, requests = source_of(clicks).eval_batches(split)
    items = torch.cat([block.sparse["C2"].values() for block in blocks])
    assert [block.num_requests for block in blocks] == [0, 0, 0] and not len(requests.sparse["C2"].values())
    assert set(items.tolist()) == every and len(items) == len(every)
    assert items[requests.answers_R].tolist() == stored.ids[stored.labels == 1, 1].tolist()


def test_three_ranks_share_a_batch_and_have_the_same_items(clicks: Path) -> None:
    whole = next(source_of(clicks).train_batches(0, 0))
    shares = [next(source_of(clicks, rank, 3).train_batches(0, 0)) for rank in range(3)]
    answers = torch.cat([share.answers_R[share.weights_R > 0] for share in shares])
    assert answers.tolist() == whole.answers_R.tolist()
    for share in shares:
        torch.testing.assert_close(share.log_inclusion_C, whole.log_inclusion_C)
        assert share.dense_SF.shape == shares[0].dense_SF.shape


def test_the_test_split_is_read_for_a_test_only(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    class Noted(SplitRows):
        def __init__(self, dataset: Dataset, split: str, *others: Any) -> None:
            opened.append(split)
            super().__init__(dataset, split, *others)

    monkeypatch.setattr("recmill.data.retrieval.SplitRows", Noted)
    source = source_of(clicks)
    next(source.train_batches(0, 0))
    assert opened == ["train"]
    assert source.num_eval_batches("val") == len(list(source.eval_batches("val")))
    assert opened == ["train", "val"]


def test_rows_count_with_their_weights_and_those_of_weight_0_are_no_requests(
    clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(rows: SplitRows) -> np.ndarray:
        return np.arange(len(rows), dtype=np.float32) % 3

    monkeypatch.setattr(SplitRows, "weights", property(weights))
    stored = rows_of(clicks, "train")
    is_request = (stored.labels == 1) & (np.arange(len(stored)) % 3 > 0)
    expected = [
        *zip(stored.ids[is_request, 0].tolist(), (np.arange(len(stored)) % 3)[is_request].tolist(), strict=True)
    ]
    found: list[tuple[int, float]] = []
    for rank in range(2):
        for batch in source_of(clicks, rank, 2).train_batches(0, 0):
            real = batch.weights_R > 0
            found += zip(batch.sparse["C1"].values().tolist(), batch.weights_R[real].tolist(), strict=True)
    assert sorted(found) == sorted(expected)


def reference_vectors(rows: Any, tables: dict[str, Tensor], columns: list[int], dense: list[int], tower: Any) -> Tensor:
    """Embed with plain indexing, then run the layers of a tower one by one."""
    inputs = [torch.from_numpy(rows.dense[:, dense].copy())]
    inputs += [tables[f"C{column + 1}"][rows.ids[:, column]] for column in columns]
    x = torch.cat(inputs, dim=1)
    layers = [layer for layer in tower.modules() if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        x = torch.relu(x @ layer.weight.T + layer.bias)
    x = x @ layers[-1].weight.T + layers[-1].bias
    return x / x.square().sum(1, keepdim=True).sqrt()


def test_loss_and_scores_equal_plain_torch(clicks: Path) -> None:
    """The reference knows nothing of batches: it takes the clicked rows of the log, and softmax over their items."""
    config, dataset = parts(clicks)
    torch.manual_seed(3)
    network: Any = model_module(config).build(config.model, dataset.description, torch.device("cpu"))
    tables = {name.split("table_")[1].split(".")[0]: value for name, value in network.tables.named_parameters()}
    source = source_of(clicks)
    batch = next(source.train_batches(0, 0))
    found = task_module(config).loss_sum(network, batch)

    _, numbers = next(source._train_shares(source._batching, 0, 0))
    rows = source._train.take(numbers)
    requests = reference_vectors(rows, tables, [0, 3], [0, 2], network.requests)
    items = reference_vectors(rows, tables, [1, 2], [1], network.items)
    scores = requests @ items.T / 0.05
    stored = rows_of(clicks, "train")
    shares = np.bincount(stored.ids[stored.labels == 1, 1], minlength=50) / (stored.labels == 1).sum()
    log_q = torch.from_numpy(np.log(1 - (1 - shares[rows.ids[:, 1]]) ** len(rows))).float()
    first = np.unique(rows.ids[:, 1], return_index=True)[1]  # an item competes once
    answers = torch.from_numpy(np.searchsorted(rows.ids[first, 1], rows.ids[:, 1]))
    expected = F.cross_entropy((scores - log_q)[:, first], answers, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    plain = source._maker.batch(rows, len(rows), np.ones(len(rows), np.float32))
    torch.testing.assert_close(network(*plain.inputs()), scores.diagonal(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"item_id": "C22"},
            "model.item_id: the dataset has no table 'C22'. Did you mean 'C2'[?] Set model.item_id to the feature that "
            "identifies an item, one of C1, C2, C3, C4.",
        ),
        ({"item_features": ["colour"]}, "model.item_features: the dataset has no feature 'colour'."),
        ({"item_features": ["C1", "C3", "C4", "I1", "I2", "I3"]}, "none is left for requests"),
        ({"share_tables": {"C1": "C3"}}, "share a table, but not all are features of items"),
    ],
)
def test_what_does_not_fit_the_dataset_is_reported(clicks: Path, model: dict[str, Any], expected: str) -> None:
    config, dataset = parts(clicks, **model)
    with pytest.raises(ConfigError, match=expected):
        build_source(config, dataset, rank=0, size=1)
    with pytest.raises(ConfigError, match=expected):  # before any process is started
        open_matching_dataset(config)


def test_roles_of_the_dataset_choose_the_tower(clicks: Path) -> None:
    config, dataset = parts(clicks, item_features=[])
    sparse = [f.model_copy(update={"role": "item" if f.name == "C4" else "user"}) for f in dataset.clicks.sparse]
    description = dataset.clicks.model_copy(update={"sparse": sparse, "dense_roles": {"I1": "item"}})
    module: Any = model_module(config)
    assert module.item_features(config.model, description) == {"C2", "C4", "I1"}


def test_the_vectors_of_items_are_those_that_score_requests(clicks: Path, tmp_path: Path) -> None:
    """Expected: the item tower's layers one by one, over the first row of each item."""
    config, dataset = parts(clicks)
    values = config.as_dict() | {"train": {"global_batch_size": 64, "max_steps": 3, "device": "cpu"}}
    train(values, tmp_path / "run")
    written = write_items(tmp_path / "run", tmp_path / "items.parquet")
    frame = pl.read_parquet(tmp_path / "items.parquet")
    directory, trained = open_trained_run(tmp_path / "run")
    network: Any = unsharded_network(directory, trained, dataset, None, False)[0]
    tables = {name.split("table_")[1].split(".")[0]: value for name, value in network.tables.named_parameters()}
    every = concatenate([rows_of(clicks, split) for split in ("train", "val", "test")])
    ids, first = np.unique(every.ids[:, 1], return_index=True)
    expected = reference_vectors(every[first], tables, [1, 2], [1], network.items)
    assert frame["id"].to_list() == ids.tolist() and written["items"] == len(ids)
    torch.testing.assert_close(torch.tensor(frame["vector"].to_list()), expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_run_is_evaluated_with_other_cut_offs(clicks: Path, tmp_path: Path) -> None:
    config, _ = parts(clicks)
    train(config.as_dict() | {"train": {"max_steps": 1, "device": "cpu"}}, tmp_path / "run")
    found = evaluate(tmp_path / "run", ks=[3, 10_000])
    assert "all/hr@3" in found and found["all/hr@10000"] == 1


def test_other_models_have_no_vectors_of_items(dlrm: dict[str, Any], tmp_path: Path) -> None:
    train(dlrm, tmp_path / "run", overrides=["train.max_steps=1"])
    with pytest.raises(ConfigError, match="'dlrm' has no vectors of items"):
        write_items(tmp_path / "run", tmp_path / "items.parquet")
    assert not (tmp_path / "items.parquet").exists()
