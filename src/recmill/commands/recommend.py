"""`recmill recommend`: the items that a trained sequence model puts next after a history."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recmill.commands.assemble import check_same_data, model_module, open_matching_dataset, open_trained_run
from recmill.errors import ConfigError, DataError
from recmill.schema import HistoriesDescription


def recommend(run: str | Path, history: Sequence[str | int], *, k: int = 10) -> list[dict[str, Any]]:
    """[{"item": original id, "title": ..., "score": ...}, ...], best first; items of the history are left out.

    `history`: original item ids, oldest first.
    """
    directory, config = open_trained_run(run)
    if model_module(config).KIND != "histories":
        raise ConfigError(
            f"{directory.path}: '{config.model_name}' is not a sequence model, so it has nothing to recommend."
        )
    dataset = open_matching_dataset(config)
    assert isinstance(dataset.about, HistoriesDescription)
    names = _item_names(dataset.path)
    ids = _known_ids(history, names, dataset.path)
    num_candidates = dataset.about.num_items - len(set(ids))
    if not 1 <= k <= num_candidates:
        raise ConfigError(
            f"--k {k}: {num_candidates} items are left outside this history; ask for 1 to {num_candidates}."
        )

    import torch  # only now: mistakes are told at once

    from recmill.observe.log import quiet_libraries
    from recmill.training import checkpoint

    quiet_libraries()
    network = model_module(config).build(config.model, dataset.about, torch.device("cpu"))
    found = checkpoint.newest(directory.checkpoints)
    assert found is not None  # looked for above
    check_same_data(found, dataset)
    checkpoint.load(found, network)
    network.eval()
    masking = model_module(config).masking(config.model)
    mask = [] if masking.get("asks_next") else [dataset.about.num_items + 1]
    tokens = torch.tensor([[*ids[-(masking["max_length"] - len(mask)) :], *mask]])
    with torch.no_grad():
        scores = network(tokens, torch.tensor([tokens.shape[1] - 1]), torch.zeros(1, dtype=torch.int64))[0]
    scores[torch.tensor(ids) - 1] = float("-inf")
    best = scores.topk(k)
    return [
        {"item": names["original_id"][i], "title": names["title"][i], "score": score}
        for i, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _item_names(path: Path) -> Any:
    import polars as pl

    return pl.read_parquet(path / "items.parquet").sort("id")


def _known_ids(history: Sequence[str | int], names: Any, path: Path) -> list[int]:
    if not history:
        raise DataError("--history is empty: name at least one item, like --history 12,7,99.")
    numbers = dict(zip(names["original_id"].to_list(), names["id"].to_list(), strict=True))
    missing = [str(item) for item in history if str(item) not in numbers]
    if missing:
        known = numbers if len(numbers) <= 5 else [*list(numbers)[:3], "..."]
        fact = f"--history: {len(missing)} item(s) are not in {path / 'items.parquet'}, column original_id: "
        raise DataError(f"{fact}{', '.join(repr(item) for item in missing[:5])}. Known items: {', '.join(known)}.")
    return [numbers[str(item)] for item in history]
