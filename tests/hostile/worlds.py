"""Small datasets with runs on them, made once and copied for each trial; and what commands print about them."""

import gzip
import json
import os
import random
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
import zstandard

from .sandbox import Outcome, Sandbox

CLICK_MODEL = {"name": "dlrm", "embedding_dim": 4, "bottom_mlp": [8, 4], "top_mlp": [8]}
SEQUENCE_MODEL = {"name": "sasrec", "embedding_dim": 8, "num_layers": 1, "max_length": 8}
CRITEO = ("prepare", "criteo", "--input", "logs", "--min-frequency", "1")
PREPARED = {  # what fills `data`
    "clicks": ("prepare", "synthetic-clicks", "--rows", "240", "--days", "2", "--dense", "2", "--tables", "5,40"),
    "incremental": ("prepare", "synthetic-clicks", "--rows", "240", "--days", "2", "--dense", "2", "--tables", "5,40"),
    "multi-hot": (*CRITEO, "--multi-hot", "2"),
    "parquet": (*CRITEO, "--format", "parquet"),
    "histories": ("prepare", "histories", "--input", "films.csv", "--user-column", "user", "--item-column", "film"),
}
NAMES = (*PREPARED, "raw")
STEPS = 6
_ITEMS = 30
_FILMS = ["Amélie", "七人の侍", 'Say "yes"', *(f"film {number}" for number in range(3, _ITEMS))]


@dataclass(frozen=True)
class Expected:
    code: int
    stdout: str


class Worlds:
    """A directory with one world per name: `data`, `run` and `config.toml`; the world `raw` has files to prepare."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"  # with the compiled kernels

    def sandbox(self, name: str) -> Sandbox:
        """Return an empty sandbox."""
        return Sandbox(self.folder / name, self.cache)

    def make(self) -> None:
        (self.folder / "originals").mkdir()
        for name in NAMES:
            sandbox = self.sandbox(f"originals/{name}")
            _write_raw(sandbox.folder)
            if name != "raw":
                must(sandbox.fork(*PREPARED[name], "--output", "data"))
                for path in sandbox.folder.iterdir():
                    if path.name != "data":
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                (sandbox.folder / "config.toml").write_text(tomli_w.dumps(config(name)), encoding="utf-8")
                must(sandbox.fork("train", "config.toml", "--run", "run"))
                if not self.cache.exists():
                    shutil.copytree(sandbox.home / ".cache", self.cache)

    def copy(self, name: str, trial: str) -> Sandbox:
        """Return a sandbox with a copy of a world."""
        sandbox = self.sandbox(trial)
        original = self.folder / "originals" / name
        shutil.copytree(original, sandbox.folder, dirs_exist_ok=True)
        saved = sandbox.folder / "run" / "config.toml"
        if saved.exists():
            text = saved.read_text(encoding="utf-8")
            saved.write_text(text.replace(str(original), str(sandbox.folder)), encoding="utf-8")
        return sandbox

    def expected(self, name: str, title: str) -> Expected:
        """Return what a command does in an unchanged world."""
        cache = self.folder / "originals" / f"{name}.{title}.json"
        if not cache.exists():
            sandbox = self.copy(name, f"expected-{name}-{title}-{os.getpid()}")
            outcome = sandbox.fork(*commands(name)[title])
            must(outcome, code=outcome.code if title == "audit" else 0)
            facts = Expected(outcome.code or 0, normalized(outcome.stdout, sandbox))
            partial = cache.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(asdict(facts)), encoding="utf-8")
            partial.rename(cache)
            sandbox.remove()
        return Expected(**json.loads(cache.read_text(encoding="utf-8")))


def must(outcome: Outcome, code: int | None = 0) -> None:
    if outcome.code is None or outcome.code != code or outcome.left:
        raise SystemExit(f"{outcome.arguments} failed without any hostility: {outcome}")


def normalized(text: str, sandbox: Sandbox) -> str:
    """Return a command's output without what differs between sandboxes: their paths, the padding after them, times."""
    text = re.sub(r"( steps?) in .* samples/s$", r"\1", text, flags=re.M)
    lines = text.replace(str(sandbox.folder), "SANDBOX").splitlines()
    return "\n".join(" ".join(line.replace("─", " ").replace("━", " ").split()) for line in lines)


def config(world: str) -> dict[str, Any]:
    is_clicks = world != "histories"
    checkpoint = {"every_steps": 2, "full_every": 4} if world == "incremental" else {"every_steps": 3}
    own: dict[str, Any] = {} if is_clicks else {"ks": [1, 5], "protocols": ["full"]}
    return {
        "model": CLICK_MODEL if is_clicks else SEQUENCE_MODEL,
        "data": {"path": "data", "prefetch": 0},
        "train": {"device": "cpu", "global_batch_size": 16, "max_steps": STEPS, "num_epochs": 9},
        "eval": {"every_steps": 3, "global_batch_size": 64, **own},
        "checkpoint": {"keep": 2, "keep_best": world == "histories", **checkpoint},
    }


def commands(world: str) -> dict[str, tuple[str, ...]]:
    """Return the commands that read a world, by title. All of them succeed, but `audit` may find faults."""
    if world == "raw":
        films = ("prepare", "histories", "--user-column", "user", "--item-column", "film", "--output", "out")
        return {
            "split": ("split", "--input", "day_0.gz", "--output", "out", "--lines", "20", "--days", "2"),
            "split-zst": ("split", "--input", "day_0.zst", "--output", "out", "--lines", "20", "--days", "2"),
            "criteo": (*CRITEO, "--output", "out"),
            "films": (*films, "--input", "films.csv"),
            "films-gz": (*films, "--input", "films.csv.gz"),
            "adopt": ("adopt", "npys"),
        }
    train = ("train", "config.toml", "--run", "new")
    resume = ("train", "config.toml", "--run", "run", "--set", f"train.max_steps={STEPS + 4}")
    evaluate = ("evaluate", "run", "--json", "--checkpoint", "newest")
    found = {
        "evaluate": evaluate,
        "evaluate-verify": (*evaluate, "--verify"),
        "evaluate-fallback": (*evaluate, "--fallback"),
        "train": train,
        "train-verify": (*train, "--verify"),
        "resume": resume,
        "resume-fallback": (*resume, "--fallback"),
        "again": ("train", "config.toml", "--run", "run"),
        "init-from": (*train, "--init-from", "run"),
        "list": ("checkpoint", "list", "run", "--json"),
        "verify": ("checkpoint", "verify", "run", "--json"),
        "inspect": ("checkpoint", "inspect", "run", "--json"),
        "results": ("results", "run"),
    }
    if world != "histories":
        return found | {"audit": ("audit", "data", "--json")}
    recommend = ("recommend", "run", "--json", "--checkpoint", "newest")
    return found | {
        "best": ("evaluate", "run", "--json", "--checkpoint", "best"),
        "recommend": (*recommend, "--history", "Amélie,film 4"),
        "recommend-users": (*recommend, "--users", "user 3"),
        "recommend-all": (*recommend, "--all", "--output", "all.parquet"),
    }


def _write_raw(folder: Path) -> None:
    """Write click logs (plain, gzip, zstd), npy files as TorchRec's scripts leave them, and histories of films."""
    choice = random.Random(1)
    logs = folder / "logs"
    logs.mkdir()
    for day in range(2):
        rows = (
            [
                choice.randrange(2),
                *(choice.randrange(9) for _ in range(13)),
                *(f"{choice.randrange(4):08x}" for _ in range(26)),
            ]
            for _ in range(60)
        )
        (logs / f"day_{day}").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    content = (logs / "day_0").read_bytes()
    (folder / "day_0.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "day_0.zst").write_bytes(zstandard.compress(content))
    films = ["user,film"]
    for user in range(20):
        films += (f"user {user},{_quoted(film)}" for film in [*_FILMS[:3], *choice.sample(_FILMS[3:], 7)])
    text = "\n".join(films) + "\n"
    (folder / "films.csv").write_text(text, encoding="utf-8")
    (folder / "films.csv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    _write_npys(folder / "npys")


def _write_npys(folder: Path) -> None:
    import numpy as np

    folder.mkdir()
    values = np.random.default_rng(1)
    for day in range(2):
        np.save(folder / f"day_{day}_dense.npy", values.random((30, 2), dtype=np.float32))
        np.save(folder / f"day_{day}_labels.npy", values.integers(0, 2, (30, 1), dtype=np.int32))
        ids = [values.integers(0, 9, (30, 2), dtype=np.int32) for _ in range(3)]
        parts = {str(number): part for number, part in enumerate(ids)}
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **parts)  # type: ignore[arg-type]


def _quoted(film: str) -> str:
    return '"' + film.replace('"', '""') + '"' if '"' in film else film
