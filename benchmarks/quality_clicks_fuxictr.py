"""FuxiCTR's DeepFM and FinalMLP on the arrays of `quality_clicks.py prepare`. Runs in FuxiCTR's environment.

    fuxictr/bin/python benchmarks/quality_clicks_fuxictr.py --data data/ml_1m_clicks --model deepfm --seeds 1,2,3

The environment is that of prepare_clicks.py. The package has no models, so they are put together from its layers, with
the settings of configs/ml_1m_clicks/, and trained by its `BaseModel.fit`. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from torch import Tensor, nn

BATCH, EVAL_BATCH, DIM, WIDTHS, HEADS = 4096, 8192, 10, [400, 400, 400], 10


class DeepFM(BaseModel):
    def __init__(self, features: FeatureMap, **settings: Any) -> None:
        super().__init__(features, **settings)
        self.vectors = FeatureEmbedding(features, DIM)
        self.fm = FactorizationMachine(features)
        self.mlp = _mlp(DIM * features.num_fields, WIDTHS, output_dim=1)
        _finish(self)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = self.get_inputs(batch)
        vectors = self.vectors(inputs)
        logits = self.fm(inputs, vectors) + self.mlp(vectors.flatten(1))
        return {"y_pred": self.output_activation(logits)}


class FinalMLP(BaseModel):
    """Both gates have a constant input, as with their `fs1_context = fs2_context = []`."""

    def __init__(self, features: FeatureMap, **settings: Any) -> None:
        super().__init__(features, **settings)
        width = DIM * features.num_fields
        self.vectors = FeatureEmbedding(features, DIM)
        self.constants = nn.ParameterList([nn.Parameter(torch.zeros(1, DIM)) for _ in range(2)])
        gate = {"output_dim": width, "hidden_units": [64], "hidden_activations": "ReLU", "output_activation": "Sigmoid"}
        self.gates = nn.ModuleList([MLP_Block(input_dim=DIM, **gate) for _ in range(2)])
        self.streams = nn.ModuleList([_mlp(width, WIDTHS), _mlp(width, WIDTHS[:1])])
        self.linear = nn.ModuleList([nn.Linear(WIDTHS[0], 1) for _ in range(2)])
        part = WIDTHS[0] // HEADS
        self.bilinear = nn.Parameter(nn.init.xavier_normal_(torch.empty(WIDTHS[0] * part, 1)).view(HEADS, part, part))
        _finish(self)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = self.vectors(self.get_inputs(batch)).flatten(1)
        gated = [flat * 2 * gate(constant) for gate, constant in zip(self.gates, self.constants, strict=True)]
        first, second = (stream(inputs) for stream, inputs in zip(self.streams, gated, strict=True))
        x, y = (out.view(len(flat), HEADS, -1) for out in (first, second))
        logits = self.linear[0](first) + self.linear[1](second)
        logits = logits + torch.einsum("bhi,hij,bhj->b", x, self.bilinear, y)[:, None]
        return {"y_pred": self.output_activation(logits)}


def _mlp(width: int, widths: list[int], output_dim: int | None = None) -> nn.Module:
    return MLP_Block(
        input_dim=width,
        output_dim=output_dim,
        hidden_units=widths,
        hidden_activations="ReLU",
        output_activation=None,
        dropout_rates=0.2,
        batch_norm=True,
    )


def _finish(model: BaseModel) -> None:
    model.compile("adam", "binary_crossentropy", 1e-3)
    model.reset_parameters()
    model.model_to_device()


class Batches:
    """Dictionaries of tensors, as FuxiCTR's loaders make them; in another order in every epoch if `shuffled`."""

    def __init__(self, columns: dict[str, Tensor], rows: int, shuffled: bool) -> None:
        self.columns, self.rows, self.shuffled = columns, rows, shuffled
        self.total = len(columns["label"])

    def __len__(self) -> int:
        return -(-self.total // self.rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.total) if self.shuffled else torch.arange(self.total)
        for chosen in order.split(self.rows):
            yield {name: column[chosen] for name, column in self.columns.items()}


def loaded(data: Path, split: str) -> dict[str, Tensor]:
    """Return the columns of a split. Unused places of several values hold 0, which is FuxiCTR's padding as well."""
    names = [feature["name"] for feature in json.loads((data / "dataset.json").read_text())["sparse"]]
    with np.load(data / f"{split}_sparse_multi_hot.npz") as stored:
        ids = {name: torch.from_numpy(stored[str(number)]) for number, name in enumerate(names)}
    columns = {name: values[:, 0] if values.shape[1] == 1 else values for name, values in ids.items()}
    columns["timestamp"] = torch.from_numpy(np.load(data / f"{split}_dense.npy"))[:, 0]
    columns["label"] = torch.from_numpy(np.load(data / f"{split}_labels.npy")).float().view(-1)
    return columns


def described(splits: list[dict[str, Tensor]]) -> FeatureMap:
    features = FeatureMap("ml_1m_clicks", "")
    features.labels = ["label"]
    for name, values in splits[0].items():
        rows = int(max(split[name].max() for split in splits)) + 1
        if name == "timestamp":
            features.features[name] = {"type": "numeric", "source": ""}
        elif values.dim() > 1:
            pooling = "layers.MaskedAveragePooling()"
            spec = {"type": "sequence", "max_len": values.shape[1], "padding_idx": 0, "feature_encoder": pooling}
            features.features[name] = {**spec, "vocab_size": rows, "source": ""}
        elif name != "label":
            features.features[name] = {"type": "categorical", "vocab_size": rows, "source": ""}
    features.num_fields = features.get_num_fields()
    features.default_emb_dim = DIM
    features.set_column_index()
    return features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=["deepfm", "finalmlp"], default="deepfm")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--l2", type=float, default=0.01)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train, val, test = (loaded(given.data, split) for split in ("train", "val", "test"))
    found = []
    for seed in given.seeds.split(","):
        seed_everything(int(seed))
        start, started = time.process_time(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "ml_1m_clicks").mkdir()
            settings = {"model_id": given.model, "model_root": folder, "metrics": ["AUC", "logloss"], "verbose": 0}
            made: type[BaseModel] = {"deepfm": DeepFM, "finalmlp": FinalMLP}[given.model]
            model = made(described([train, val, test]), embedding_regularizer=given.l2, **settings)
            model.fit(Batches(train, BATCH, True), epochs=60, validation_data=Batches(val, EVAL_BATCH, False))
        splits = {"val": val, "test": test}
        values = {name: model.evaluate(Batches(rows, EVAL_BATCH, False)) for name, rows in splits.items()}
        times = {"epochs": model._epoch_index + 1, "cpu_minutes": round((time.process_time() - start) / 60, 1)}
        times["minutes"] = round((time.monotonic() - started) / 60, 1)
        print(f"{given.model}, seed {seed}: {values}, {times}", flush=True)
        found.append(values["test"]["AUC"])
    print(json.dumps({"model": given.model, "test_auroc": found, "mean": statistics.mean(found)}))


if __name__ == "__main__":
    main()
