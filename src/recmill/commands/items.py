"""`recmill items`: the vectors of all items, by the two-tower model of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Which, flag, new_path
from recmill.config.options import checked_options
from recmill.config.sections import Section
from recmill.data.recipes import has_recipe, kept_dataset, vocabulary_file
from recmill.errors import ConfigError
from recmill.files.atomic import new_file
from recmill.models import two_tower
from recmill.observe.log import quiet_libraries

if TYPE_CHECKING:
    import polars as pl


class Options(Section):
    output: str = flag(..., "Parquet file to write: id, item (as in the log, if it is known) and vector.")
    checkpoint: Which = None
    fallback: Fallback = False


@checked_keywords
def write_items(
    run: str | Path,
    output: str | Path,
    *,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
) -> dict[str, Any]:
    """Write the vectors of all items of the run's dataset to a Parquet file; return {"items", "dim", "output"}.

    The dot product of an item's vector with that of a request, divided by `model.temperature`, is the score of
    `recmill predict`. An item has the features of the first row in which it occurs.
    """
    given = {"output": str(output), "checkpoint": checkpoint, "fallback": fallback}
    options = checked_options("items", Options, given)
    assemble.check_which(options.checkpoint)
    directory, config = assemble.open_trained_run(run)
    if not isinstance(config.model, two_tower.Config):
        raise ConfigError(f"{directory.path}: '{config.model_name}' has no vectors of items. Train a 'two_tower'.")
    path = new_path(options.output, "--output")
    dataset = assemble.open_matching_dataset(config)
    network, _ = assemble.unsharded_network(directory, config, dataset, options.checkpoint, options.fallback)
    import polars as pl

    from recmill.data.retrieval import RetrievalSource

    with quiet_libraries():
        source = assemble.build_source(config, dataset, rank=0, size=1)
        assert isinstance(source, RetrievalSource)
        vectors = np.concatenate(list(_vectors(network, source)))
    frame = pl.DataFrame({"id": source.item_ids.astype(np.int64)})
    if has_recipe(directory.path):
        names = _names(kept_dataset(directory.path).path, config.model.item_id)
        frame = frame.join(names, on="id", how="left", maintain_order="left") if names is not None else frame
    frame = frame.with_columns(vector=pl.Series(list(vectors), dtype=pl.List(pl.Float32)))
    with new_file(path) as partial:
        frame.write_parquet(partial)
    return {"items": frame.height, "dim": vectors.shape[1], "output": str(path)}


def _vectors(network: Any, source: Any) -> Iterator[np.ndarray]:
    import torch

    with torch.no_grad():
        for inputs in source.all_item_inputs():
            yield network.item_vectors(network.inputs(*inputs)).numpy()


def _names(recipe: Path, feature: str) -> "pl.DataFrame | None":
    """Return the value in the log of each id, or None if the ids are hashes."""
    import polars as pl

    file = recipe / vocabulary_file(feature)
    if not file.is_file():
        return None
    return pl.read_parquet(file, columns=["id", "value"]).rename({"value": "item"}).cast({"id": pl.Int64})
