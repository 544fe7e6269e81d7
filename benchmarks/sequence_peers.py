"""Train the peers of train_sequences.py, each in an endless loop. They run in their own environments, without recmill.

All read the same windows of histories (`Windows`) from a folder, and record every step.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from turns import Notes

# Turns off what takes time or writes files in Lightning's trainers.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Setting:
    """The settings that are equal for all contenders."""

    model: str  # bert4rec, sasrec
    max_length: int
    batch: int
    dim: int
    layers: int
    heads: int
    mask: float


@dataclass(frozen=True)
class Windows:
    """Window i is items[offsets[i]:offsets[i + 1]], ids from 1; SASRec has one item more, the last target."""

    setting: Setting
    num_items: int
    items: np.ndarray
    offsets: np.ndarray

    def save(self, folder: Path) -> None:
        (folder / "setting.json").write_text(json.dumps({**asdict(self.setting), "num_items": self.num_items}))
        np.savez(folder / "windows.npz", items=self.items, offsets=self.offsets)

    @staticmethod
    def load(folder: Path) -> "Windows":
        setting = json.loads((folder / "setting.json").read_text())
        num_items, arrays = setting.pop("num_items"), np.load(folder / "windows.npz")
        return Windows(Setting(**setting), num_items, arrays["items"], arrays["offsets"])

    def __iter__(self) -> Any:
        return iter(np.split(self.items, self.offsets[1:-1]))

    def __len__(self) -> int:
        return len(self.offsets) - 1


def torchrec_style(windows: Windows, notes: Notes) -> None:
    """Train as TorchRec's BERT4Rec example does: always padded, masked once before training, logits everywhere."""
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset
    from torchrec import EmbeddingCollection, KeyedJaggedTensor
    from torchrec.modules.embedding_configs import EmbeddingConfig

    setting = windows.setting
    length, dim, heads = setting.max_length, setting.dim, setting.heads
    vocabulary = windows.num_items + 2  # padding, mask
    dropout = 0.1

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            q, k, v = (
                layer(x).view(len(x), length, heads, dim // heads).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            scores = (q @ k.transpose(2, 3)) / (dim // heads) ** 0.5
            weights = self.dropout(scores.masked_fill(~real[:, None, None, :], -1e9).softmax(3))
            return self.out((weights @ v).transpose(1, 2).reshape(len(x), length, dim))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))
            self.norms = nn.ModuleList(nn.LayerNorm([length, dim]) for _ in range(2))
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            x = x + self.dropout(self.attention(self.norms[0](x), real))
            return x + self.dropout(self.feed(self.norms[1](x)))

    class Bert4Rec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = EmbeddingConfig(name="item", embedding_dim=dim, num_embeddings=vocabulary, feature_names=["item"])
            self.items = EmbeddingCollection(tables=[table], device=torch.device("cpu"))
            self.places = nn.Parameter(torch.randn(length, dim))
            self.norm, self.dropout = nn.LayerNorm([length, dim]), nn.Dropout(dropout)
            self.blocks = nn.ModuleList(Block() for _ in range(setting.layers))
            self.head = nn.Linear(dim, vocabulary)

        def forward(self, tokens: Tensor) -> Tensor:
            ids = KeyedJaggedTensor.from_lengths_sync(
                keys=["item"],
                values=tokens.flatten(),
                lengths=torch.full((len(tokens),), length, dtype=torch.int32),
            )
            embedded = self.items(ids)["item"].to_padded_dense(length)
            x, real = self.dropout(self.norm(embedded + self.places)), tokens != 0
            for block in self.blocks:
                x = block(x, real)
            return self.head(x)

    random = np.random.default_rng(1)
    tokens = np.zeros((len(windows), length), dtype=np.int64)
    for row, items in zip(tokens, windows, strict=True):
        row[length - len(items) :] = items
    asked = (tokens > 0) & (random.random(tokens.shape) < setting.mask)
    labels = np.where(asked, tokens, 0)
    others = random.integers(1, windows.num_items + 1, tokens.shape)
    hidden = np.where(random.random(tokens.shape) < 0.8, windows.num_items + 1, others)
    rows = TensorDataset(torch.from_numpy(np.where(asked, hidden, tokens)), torch.from_numpy(labels))
    loader = DataLoader(rows, batch_size=setting.batch, shuffle=True)
    model = Bert4Rec()
    loss_of = nn.CrossEntropyLoss(ignore_index=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    while True:
        for batch, answers in loader:
            optimizer.zero_grad()
            loss = loss_of(model(batch).view(-1, vocabulary), answers.view(-1))
            loss.backward()
            optimizer.step()
            notes.step(len(batch), int((batch != 0).sum()))


def rectools(windows: Windows, notes: Notes) -> None:
    """Train with `model.fit(dataset)`, where a window is a user, with RecTools' defaults except for the sizes."""
    import pandas as pd
    from pytorch_lightning import Callback, Trainer
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import BERT4RecModel, SASRecModel

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            notes.step(len(batch["x"]), int((batch["x"] != 0).sum()))

    setting = windows.setting
    users = np.repeat(np.arange(len(windows)), np.diff(windows.offsets))
    times = pd.to_datetime(np.arange(len(windows.items)), unit="s")
    columns = {Columns.User: users, Columns.Item: windows.items, Columns.Weight: 1.0, Columns.Datetime: times}
    model = {"bert4rec": BERT4RecModel, "sasrec": SASRecModel}[setting.model](
        n_blocks=setting.layers,
        n_heads=setting.heads,
        n_factors=setting.dim,
        session_max_len=setting.max_length,
        batch_size=setting.batch,
    )
    model._trainer = Trainer(  # as documented; it differs from RecTools' own in callback and number of epochs
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[Noting()],
        **QUIET,
    )
    model.fit(Dataset.construct(pd.DataFrame(columns)))


def replay(windows: Windows, notes: Notes, loss: str = "CE") -> None:
    """Train with Lightning on RePlay's datasets, where a window is a query, with its defaults except for the sizes."""
    import lightning

    class Noting(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            real = batch["pad_mask" if "pad_mask" in batch else "padding_mask"]
            notes.step(len(real), int(real.sum()))

    make = {"bert4rec": _replay_bert4rec, "sasrec": _replay_sasrec}[windows.setting.model]
    module, data = make(windows, loss)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[Noting()],
        **QUIET,
        limit_val_batches=0,
    )
    trainer.fit(module, data)


def _replay_schema(windows: Windows, padding: int) -> Any:
    from replay.data import FeatureHint, FeatureSource, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema

    item = TensorFeatureInfo(
        name="item_id",
        is_seq=True,
        cardinality=windows.num_items,
        padding_value=padding,
        embedding_dim=windows.setting.dim,
        feature_type=FeatureType.CATEGORICAL,
        feature_hint=FeatureHint.ITEM_ID,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
    )
    return TensorSchema(item)


def _replay_bert4rec(windows: Windows, loss: str) -> tuple[Any, Any]:
    import pandas as pd
    from replay.data.nn import PandasSequentialDataset
    from replay.models.nn.sequential import Bert4Rec
    from replay.models.nn.sequential.bert4rec import Bert4RecTrainingDataset
    from torch.utils.data import DataLoader

    setting, schema = windows.setting, _replay_schema(windows, padding=0)  # the default; a mask tells it from item 0
    frame = pd.DataFrame({"user_id": np.arange(len(windows)), "item_id": [items - 1 for items in windows]})
    rows = Bert4RecTrainingDataset(
        PandasSequentialDataset(schema, "user_id", "item_id", frame), max_sequence_length=setting.max_length
    )
    module = Bert4Rec(
        schema,
        block_count=setting.layers,
        head_count=setting.heads,
        hidden_size=setting.dim,
        max_seq_len=setting.max_length,
        loss_type=loss,
    )
    return module, DataLoader(rows, batch_size=setting.batch, shuffle=True)


def _replay_sasrec(windows: Windows, loss: str) -> tuple[Any, Any]:
    """Build RePlay's SASRec; `loss` has no effect, because this model has only one cross-entropy."""
    import tempfile

    import pyarrow as pa
    import pyarrow.parquet as pq
    from replay.data.nn import ParquetModule
    from replay.nn.lightning import LightningModule
    from replay.nn.sequential import SasRec
    from replay.nn.transform.template import make_default_sasrec_transforms

    setting, schema = windows.setting, _replay_schema(windows, padding=windows.num_items)
    file = Path(tempfile.mkdtemp()) / "windows.parquet"
    pq.write_table(pa.table({"item_id": pa.array([items - 1 for items in windows])}), file)
    model = SasRec.from_params(
        schema,
        embedding_dim=setting.dim,
        num_heads=setting.heads,
        num_blocks=setting.layers,
        max_sequence_length=setting.max_length,
        hidden_dim=4 * setting.dim,
    )
    data = ParquetModule(
        setting.batch,
        {"train": {"item_id": {"shape": setting.max_length + 1, "padding": windows.num_items}}},
        {"train": make_default_sasrec_transforms(schema)["train"]},
        train_path=str(file),
    )
    return LightningModule(model), data


def replay_restricted(windows: Windows, notes: Notes) -> None:
    """Train BERT4Rec with the other loss of RePlay's documentation, with logits only at the masked positions."""
    replay(windows, notes, "CE_restricted")


PEERS: dict[str, Callable[[Windows, Notes], None]] = {
    "torchrec_style": torchrec_style,
    "rectools": rectools,
    "replay": replay,
    "replay_restricted": replay_restricted,
}

if __name__ == "__main__":
    name, folder, noted = sys.argv[1:]
    PEERS[name](Windows.load(Path(folder)), Notes(Path(noted)))
