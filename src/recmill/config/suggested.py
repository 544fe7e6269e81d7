"""Commands that messages suggest to users."""

import shlex
from pathlib import Path


def own_config(dataset: Path) -> str:
    """Return the name of the shipped config that trains on a prepared dataset, or nothing if `dataset` is not one."""
    if not (dataset / "dataset.json").is_file():
        return ""
    return "own/sasrec" if (dataset / "users.parquet").is_file() else "own/dlrm"


def training_command(dataset: Path) -> str:
    """Return the command that trains on a prepared dataset."""
    setting, run = f"data.path={dataset}", f"runs/{dataset.absolute().name}"
    return shlex.join(["recmill", "train", own_config(dataset), "--set", setting, "--run", run])


def resuming_command(run: Path) -> str:
    """Return the command that resumes a run."""
    return shlex.join(["recmill", "train", str(run / "config.toml"), "--run", str(run)])
