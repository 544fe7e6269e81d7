"""The best items of new requests, by the two-tower model of a run.

The capitals at the end of an array's name are its axes: R requests, C items, D dims, K best items.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recmill.commands import assemble
from recmill.commands.options import STREAM, dataset_checks, flag, new_path
from recmill.commands.predict import Options, Predictor, RowEncoder
from recmill.config.options import checked_options
from recmill.data.recipes import has_recipe, kept_dataset, vocabulary_file
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.errors import ConfigError
from recmill.models import two_tower
from recmill.observe.log import quiet_libraries

if TYPE_CHECKING:
    import polars as pl

    from recmill.data.click_rows import ClickRows
    from recmill.data.retrieval import RetrievalSource

_REQUESTS_AT_ONCE = 1 << 7  # times a block of items: 30 MB per thread


class RequestOptions(Options):
    """Those of `recmill predict`, for files of requests."""

    k: int = flag(10, "How many items.")


class Retriever(Predictor):
    """A run's two towers on CPU, with the vectors of all items of its dataset."""

    reads_labels = False

    def __init__(
        self, run: str | Path, which: str | None = None, fallback: bool = False, verify: bool | None = None
    ) -> None:
        super().__init__(run, which, fallback)
        if not isinstance(self._config.model, two_tower.Config):
            raise ConfigError(
                f"{self.run.path}: '{self._config.model_name}' has no vectors of items. Train a 'two_tower'."
            )
        self._model = self._config.model
        self._open_dataset = assemble.open_matching_dataset(self._config, dataset_checks(verify))

    @classmethod
    def of(cls, predictor: Predictor) -> "Retriever":
        """Return a retriever with the network that `predictor` has loaded."""
        retriever = cls(predictor.run.path)
        retriever.network, retriever._checkpoint = predictor.network, predictor._checkpoint
        return retriever

    @cached_property
    def encoder(self) -> RowEncoder:
        """Reads only what features of requests are made of."""
        from recmill.datasets.own_clicks.encoding import Encoder, load_recipe
        from recmill.datasets.own_clicks.schema import NumericFeature

        path = kept_dataset(self.run.path).path
        recipe = load_recipe(path)
        names = {f.name: f.dense_names if isinstance(f, NumericFeature) else [f.name] for f in recipe.log.feature}
        of_items = two_tower.item_features(self._model, self._dataset.clicks)
        return Encoder(recipe, path, {name for name, made in names.items() if of_items.issuperset(made)})

    @cached_property
    def _source(self) -> "RetrievalSource":
        return assemble.build_source(self._config, self._dataset, rank=0, size=1)  # type: ignore[return-value]

    @cached_property
    def items(self) -> "pl.DataFrame":
        """Column id of all items, ascending, and column item, as in the log, if the run keeps the vocabulary."""
        import polars as pl

        frame = pl.DataFrame({"id": self._source.item_ids.astype(np.int64)})
        owners = {feature.name: feature.share_table or feature.name for feature in self._dataset.clicks.sparse}
        file = vocabulary_file(owners[self._model.item_id])
        if not has_recipe(self.run.path) or not (kept_dataset(self.run.path).path / file).is_file():
            return frame
        names = pl.read_parquet(kept_dataset(self.run.path).path / file, columns=["id", "value"], glob=False)
        names = names.rename({"value": "item"}).cast({"id": pl.Int64})
        return frame.join(names, on="id", how="left", maintain_order="left")

    @cached_property
    def item_vectors_CD(self) -> np.ndarray:
        """The vectors of `items`."""
        network = self.network  # imports torch in the fast way
        import torch

        with torch.no_grad(), quiet_libraries():
            all_inputs = self._source.all_item_inputs()
            found = [network.item_vectors(network.inputs(*inputs)).numpy() for inputs in all_inputs]
        return self._finite(np.concatenate(found))

    @cached_property
    def _offered(self) -> "tuple[pl.Series, np.ndarray]":
        """The names (or ids, if they are hashes) and vectors of items, without ids of no value or of rare ones."""
        from recmill.datasets.own_clicks.schema import FIRST_VALUE

        first = int(np.searchsorted(self.items["id"].to_numpy(), FIRST_VALUE))
        return self.items[first:, -1], self.item_vectors_CD[first:]

    @property
    def dim(self) -> int:
        return self._model.request_mlp[-1]

    @property
    def made(self) -> list[str]:
        return ["rank", self.item_column, "score"]

    @property
    def item_column(self) -> str:
        return self.items.columns[-1]

    def check_k(self, k: int) -> None:
        num_items = len(self._offered[0])
        if not 1 <= k <= num_items:
            raise ConfigError(f"--k {k}: there are {num_items} items; ask for 1 to {num_items}.")

    def request_vectors(self, encoded: "ClickRows") -> np.ndarray:
        network = self.network
        found = self._outputs(encoded, lambda *inputs: network.request_vectors(network.inputs(*inputs)))
        return found.reshape(len(encoded), self.dim)

    def best(self, kept: "pl.DataFrame", encoded: "ClickRows", k: int) -> "pl.DataFrame":
        """Return the columns to keep, rank, item and score of the K best items of each row, best first."""
        import polars as pl
        import torch

        from recmill.tasks.retrieval import best_items

        names, vectors_CD = self._offered
        items_CD = torch.from_numpy(vectors_CD)
        requests_RD = torch.from_numpy(self.request_vectors(encoded))
        found = [best_items(some_RD, items_CD, k) for some_RD in requests_RD.split(_REQUESTS_AT_ONCE)]
        scores = torch.cat([scores_RK for scores_RK, _ in found]).flatten() / self.network.temperature
        indices = torch.cat([indices_RK for _, indices_RK in found]).flatten().numpy()
        rows = np.repeat(np.arange(len(encoded)), k)
        ranks = np.tile(np.arange(1, k + 1, dtype=np.int32), len(encoded))
        made = {"rank": ranks, self.item_column: names.gather(indices), "score": scores.numpy()}
        return pl.DataFrame([*(column.gather(rows) for column in kept), *pl.DataFrame(made)])

    def scored(self, kept: "pl.DataFrame", encoded: "ClickRows") -> "pl.DataFrame":
        return self.best(kept, encoded, self.rows_per_row)

    def best_of_frame(
        self, frame: "pl.DataFrame", k: int, keep: Sequence[str], new_rows: NewRowsFlags
    ) -> "pl.DataFrame":
        """Return what `best` does for the rows of a frame."""
        self.check_k(k)
        encoded = self.encoded(frame, keep, new_rows)
        with self.one_thread():
            return self.best(frame.select(keep), encoded, k)

    def write_best(self, options: dict[str, Any]) -> dict[str, Any]:
        """Write what `best` does for the rows of a file."""
        from recmill.commands.scored_files import score_files

        checked = checked_options("recommend", RequestOptions, options)
        if checked.output != STREAM:
            new_path(checked.output, "--output")  # fails before all items are read
        self.check_k(checked.k)
        self.rows_per_row = checked.k
        written = score_files(self, self.made, checked)
        return written | {"requests": written["rows"], "rows": written["written"]}


class RequestVectors(Retriever):
    """Gives the vectors of requests instead of their best items."""

    @property
    def made(self) -> list[str]:
        return ["vector"]

    def scored(self, kept: "pl.DataFrame", encoded: "ClickRows") -> "pl.DataFrame":
        import polars as pl

        vectors = pl.Series("vector", self.request_vectors(encoded)).cast(pl.List(pl.Float32))
        return pl.DataFrame([*kept, vectors])
