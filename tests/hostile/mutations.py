"""Corrupt one file of a dataset, a run or a checkpoint, or move a checkpoint; then run a command that reads it."""

import contextlib
import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from .sandbox import Outcome, Sandbox
from .verdict import Finding, judge, shown
from .worlds import NAMES, STEPS, Expected, Worlds, commands, normalized

MARKER = "code-was-executed"
# The commands that load a checkpoint or report its digests, and so notice each change of it
LOADING = ("evaluate", "evaluate-verify", "resume", "init-from", "recommend", "recommend-users", "recommend-all")
_IMPOSSIBLE: list[Any] = [None, -1, 0, 10**30, 1.5, float("nan"), "", "../../etc", "\x00", True, [], {}, [[]], {"": 0}]


class Evil:
    """Unpickling it creates a file, as any other code could run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@dataclass(frozen=True)
class Target:
    """A file of a world, relative to it, and how it is changed."""

    world: str
    file: str
    mutation: str

    @property
    def group(self) -> str:
        parts = Path(self.file).parts
        return "checkpoint" if "checkpoints" in parts else parts[0] if self.world != "raw" else "raw"


# How to change a file. Each function changes `file` in place.


def _flip(file: Path, choice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    file.write_bytes(content)


def _flip_header(file: Path, choice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[choice.randrange(min(len(content), 128))] ^= 1 << choice.randrange(8)
    file.write_bytes(content)


def _flip_end(file: Path, choice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[-1 - choice.randrange(min(len(content), 64))] ^= 1 << choice.randrange(8)
    file.write_bytes(content)


def _truncate(file: Path, choice: random.Random) -> None:
    os.truncate(file, choice.randrange(file.stat().st_size))


def _extend(file: Path, choice: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(choice.choice([b"\0", b"x", b"}", choice.randbytes(5000)]))


def _zero_block(file: Path, choice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = choice.randrange(len(content))
    size = min(choice.choice([8, 64, 4096]), len(content) - start)
    content[start : start + size] = bytes(size)
    file.write_bytes(content)


def _noise(file: Path, choice: random.Random) -> None:
    file.write_bytes(choice.randbytes(file.stat().st_size))


def _empty(file: Path, choice: random.Random) -> None:
    file.write_bytes(b"")


def _delete(file: Path, choice: random.Random) -> None:
    file.unlink()


def _directory(file: Path, choice: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path, choice: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(to: str) -> Callable[[Path, random.Random], None]:
    def change(file: Path, choice: random.Random) -> None:
        file.unlink()
        file.symlink_to(file.name if to == "itself" else to)

    return change


def _link_to_copy(file: Path, choice: random.Random) -> None:
    real = _world_of(file) / "aside"
    shutil.copyfile(file, real)
    file.unlink()
    file.symlink_to(real)


def _other(file: Path, choice: random.Random) -> Path:
    files = [path for path in sorted(_world_of(file).rglob("*")) if path.is_file() and path != file]
    alike = [path for path in files if path.suffix == file.suffix or path.parent == file.parent]
    return choice.choice(alike or files)


def _other_content(file: Path, choice: random.Random) -> None:
    shutil.copyfile(_other(file, choice), file)


def _swap(file: Path, choice: random.Random) -> None:
    beside = [path for path in sorted(file.parent.iterdir()) if path.is_file() and path != file]
    other = choice.choice(beside) if beside else _other(file, choice)
    content = other.read_bytes()
    shutil.copyfile(file, other)
    file.write_bytes(content)


def _evil(file: Path, choice: random.Random) -> None:
    evil = Evil(_world_of(file) / MARKER)
    if file.suffix == ".npy":  # an array of objects, which NumPy would unpickle
        import numpy as np

        np.save(file, np.array([evil], dtype=object), allow_pickle=True)
    elif file.suffix == ".distcp":
        import torch

        torch.save(evil, file)
    else:
        file.write_bytes(pickle.dumps(evil))


def _impossible_json(file: Path, choice: random.Random) -> None:
    value = json.loads(file.read_bytes())
    parent, key = choice.choice(list(_places(value)))
    if isinstance(parent, dict) and choice.random() < 0.15:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(choice.choice([bad for bad in _IMPOSSIBLE if repr(bad) != repr(parent[key])]))
    file.write_text(json.dumps(value), encoding="utf-8")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything in a JSON value."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _odd_json(file: Path, choice: random.Random) -> None:
    odd = [
        "[" * 100_000,
        "{}",
        "[]",
        "null",
        "1" * 5000,
        '{"a": ' * 50_000,
        "\ufeff" + file.read_text(),
        "NaN",
        '"\\ud800"',
    ]
    file.write_text(choice.choice(odd), encoding="utf-8")


_ANY_FILE: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": _flip,
    "flip-header": _flip_header,
    "flip-end": _flip_end,
    "truncate": _truncate,
    "extend": _extend,
    "zero": _zero_block,
    "noise": _noise,
    "empty": _empty,
    "delete": _delete,
    "directory": _directory,
    "fifo": _fifo,
    "link-itself": _link("itself"),
    "link-nowhere": _link("nowhere/at/all"),
    "link-zero": _link("/dev/zero"),
    "link-copy": _link_to_copy,
    "content": _other_content,
    "swap": _swap,
    "evil": _evil,
}
_JSON_FILE = {"impossible": _impossible_json, "odd": _odd_json}


# How to change a whole checkpoint, or the directory of all


def _remove_tree(folder: Path, choice: random.Random) -> None:
    shutil.rmtree(folder)


def _empty_tree(folder: Path, choice: random.Random) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _copy_tree(*names: str) -> Callable[[Path, random.Random], Path]:
    return lambda folder, choice: shutil.copytree(folder, folder.with_name(choice.choice(names)))


def _rename_tree(*names: str) -> Callable[[Path, random.Random], Path]:
    return lambda folder, choice: folder.rename(folder.with_name(choice.choice(names)))


_NEWER = ("step-00000009", "step-99999999", "step-7")
_TREE: dict[str, Callable[[Path, random.Random], Any]] = {
    "remove": _remove_tree,
    "empty-tree": _empty_tree,
    "copy-older": _copy_tree("step-00000001"),
    "copy-newer": _copy_tree(*_NEWER),
    "rename-older": _rename_tree("step-00000001"),
    "rename-newer": _rename_tree(*_NEWER),
}
_TREE_SHARE = 3  # how often each of these changes is among the trials
_CHANGES = _ANY_FILE | _JSON_FILE | _TREE
_SIGNED = ("flip", "flip-header", "flip-end", "truncate", "zero", "empty", "content", "evil", "impossible", "odd")


def _world_of(file: Path) -> Path:
    return next(parent for parent in file.parents if (parent / "config.toml").exists() or (parent / "npys").exists())


def _sign(file: Path) -> None:
    """Make the digests beside a file match its content."""
    facts = {"bytes": file.stat().st_size, "xxh3": xxhash.xxh3_128_hexdigest(file.read_bytes())}
    for name in ("MANIFEST.json", "dataset.json"):
        listed = file.with_name(name)
        if listed.is_file() and listed != file:
            content = json.loads(listed.read_bytes())
            content["files"].get(file.name, {}).update(facts)
            listed.write_text(json.dumps(content, indent=1), encoding="utf-8")
    manifest = file.with_name("MANIFEST.json")
    for other in file.parent.parent.glob("step-*/state.json"):  # incremental checkpoints name their base's manifest
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # this is the file that was changed
            content = json.loads(other.read_bytes())
            if content["base"] == manifest.parent.name and other != file:
                content["base_manifest"] = xxhash.xxh3_128_hexdigest(manifest.read_bytes())
                other.write_text(json.dumps(content, indent=1), encoding="utf-8")
                _sign(other)


# Which trials there are, and what is expected


@cache
def _targets(folder: Path) -> list[Target]:
    """Return every change of every file, in a fixed order."""
    found = []
    for world in NAMES:
        root = folder / "originals" / world
        found += [
            Target(world, f"run/checkpoints/{path.name}", name)
            for path in sorted((root / "run" / "checkpoints").glob("step-*"))
            for name in _TREE
            for _ in range(_TREE_SHARE)
        ]
        found += [Target(world, "run/checkpoints", name) for name in ("remove", "empty-tree")] if world != "raw" else []
        for path in sorted(root.rglob("*")):
            if not path.is_file() or path.name in (".lock", "log.txt"):
                continue
            names = [*_ANY_FILE, *(_JSON_FILE if path.suffix == ".json" else {})]
            if path.parent.name == "data" or "checkpoints" in path.parts:
                names += [f"signed-{name}" for name in _SIGNED if name in names]
            if path == root / "config.toml":
                names.remove("fifo")  # a config may come from a pipe
            found += [Target(world, str(path.relative_to(root)), name) for name in names]
    return found


def run_trial(
    worlds: Worlds, name: str, index: int, choice: random.Random, order: random.Random
) -> tuple[str, list[Finding]]:
    """Make one trial; return what it did and what it found. `order` is the same for all trials."""
    targets = list(_targets(worlds.folder))
    order.shuffle(targets)
    target = targets[index % len(targets)]
    title = choice.choice(_titles(target))
    sandbox = worlds.copy(target.world, name)
    file = sandbox.folder / target.file
    mutation = target.mutation.removeprefix("signed-")
    original = None if mutation in _TREE else file.read_bytes()
    if mutation in ("flip", "flip-header", "flip-end", "truncate", "zero", "noise") and not original:
        mutation = "extend"
    _CHANGES[mutation](file, choice)
    if target.mutation.startswith("signed-"):
        _sign(file)
    is_changed = mutation != "link-copy" and not (file.is_file() and file.read_bytes() == original)
    arguments = commands(target.world)[title]
    outcome = sandbox.fork(*arguments)
    what = f"{target.world}/{target.file} {target.mutation}; {shown(arguments)}"
    found = _judge(worlds, target, title, outcome, sandbox, is_changed)
    if (sandbox.folder / MARKER).exists():
        found.append(Finding("bug", "code from a file was executed"))
    return what, found


def _titles(target: Target) -> list[str]:
    """Return the commands that read the file."""
    titles = list(commands(target.world))
    if target.group == "data":
        return [title for title in titles if title not in ("results", "list", "verify", "inspect", "again")]
    if target.group == "checkpoint":
        return [title for title in titles if title not in ("results", "train", "train-verify", "audit", "again")]
    if target.group == "run":
        return [title for title in titles if title not in ("train", "train-verify", "audit")]
    if target.group == "config.toml":
        return ["train", "resume", "again"]
    file = target.file
    readers = {"day_0.gz": ["split"], "day_0.zst": ["split-zst"], "films.csv": ["films"], "films.csv.gz": ["films-gz"]}
    return readers.get(file) or (["adopt"] if file.startswith("npys") else ["criteo"])


def _judge(
    worlds: Worlds, target: Target, title: str, outcome: Outcome, sandbox: Sandbox, is_changed: bool
) -> list[Finding]:
    expected = worlds.expected(target.world, title)
    path = Path(target.file)
    folder = path.parent
    names = [path.name, str(sandbox.folder / folder), f"{folder}/", f"error: {folder}", "the newest in run/checkpoints"]
    must_notice = is_changed and _must_notice(target, title, outcome)
    codes = _codes(target) if must_notice else {expected.code, 0, *_codes(target)}
    found = judge(outcome, codes, () if _is_config(target) else names)
    is_equal = outcome.code == expected.code and normalized(outcome.stdout, sandbox) == expected.stdout
    if outcome.code == 0 and not is_equal and not _may_differ(target, title, outcome, expected):
        found.append(Finding("bug", f"exit code 0, but other output: {outcome.stdout[:200]!r}"))
    return found


def _is_config(target: Target) -> bool:
    """Return whether the file is a config: a change of it may mean another run, whose error is about something else."""
    return target.file.endswith("config.toml")


def _codes(target: Target) -> set[int]:
    """Return the exit codes that are right for an error about a file of this kind."""
    if _is_config(target):
        return {2, 3, 4, 5}
    if target.group == "checkpoint":
        return {4}
    if target.group == "run":
        codes = {2, 4, 5} if target.mutation == "swap" else {4, 5}  # 2: the config may be the other file
        return {1, *codes} if target.file.endswith("results.json") else codes  # 1: no results yet
    if target.file.endswith("dataset.json"):
        return {2, 3, 4, 5}  # it may now describe another dataset than the run's, or one that is too large
    if target.group == "raw" and target.mutation == "link-itself":
        return {2, 3}  # a path that leads back to itself
    return {3, 4} if target.mutation.startswith(("signed-", "swap")) else {3}


def _must_notice(target: Target, title: str, outcome: Outcome) -> bool:
    """Return whether a command must end with an error, because it reads what was changed, and digests tell."""
    if target.mutation.startswith("signed-") or _is_config(target):
        return False
    if target.group == "data":
        return Path(target.file).name not in ("dataset.json", "preparation.json")  # the latter is for people
    if target.group != "checkpoint" or target.mutation == "odd":  # which may be valid: a byte order mark
        return False
    if title == "verify":
        return target.mutation != "remove" or _is_needed(target)
    reads_it = _is_needed(target) and target.mutation != "copy-older"
    return title in LOADING and (reads_it or target.mutation.endswith("-newer"))


def _is_needed(target: Target) -> bool:
    """Return whether the newest checkpoint cannot be loaded without this file or directory."""
    names = Path(target.file).parts
    is_base = target.world == "incremental" and "step-00000002" in names
    return len(names) == 2 or f"step-{STEPS:08d}" in names or is_base


def _is_without(target: Target, outcome: Outcome, expected: Expected) -> bool:
    """Return whether a list of checkpoints is the usual one without the target.

    A run removes older checkpoints itself, and users do to free space: only the newest, and what it needs, must exist.
    """
    usual = json.loads(expected.stdout)
    return bool(json.loads(outcome.stdout) == [facts for facts in usual if facts["path"] != target.file])


def _differs_in_sizes_only(outcome: Outcome, expected: Expected) -> bool:
    """Return whether two lists of checkpoints are equal but for their bytes."""
    found, usual = ([facts | {"bytes": 0} for facts in json.loads(text)] for text in (outcome.stdout, expected.stdout))
    return bool(found == usual)


def _may_differ(target: Target, title: str, outcome: Outcome, expected: Expected) -> bool:
    """Return whether a command may succeed with another output than without the change."""
    name = Path(target.file).name
    keeps_size = target.mutation in ("flip", "flip-header", "flip-end", "zero", "noise", "swap", "content")
    if target.mutation == "remove" and title in ("list", "verify") and not _is_needed(target):
        return _is_without(target, outcome, expected)
    if target.mutation == "odd" and title in ("list", "verify") and _differs_in_sizes_only(outcome, expected):
        return True  # a byte order mark before a manifest that says the same
    if target.mutation in _TREE and title == "list":
        return any(word in outcome.text for word in ("missing", "copy"))
    if "falling back to" in outcome.stderr:
        return title.endswith("-fallback")
    if "was not kept: testing step" in outcome.stderr:  # the best one, which training would have tested, is gone
        return True
    if target.mutation.startswith("signed-") or target.group == "raw" or _is_config(target):
        return True  # it is other input, as good as any
    if target.group == "data":
        return name == "dataset.json"
    if title == "list":
        return name in outcome.text or keeps_size
    is_shown = title in ("again", "resume", "resume-fallback", "results")
    return name in ("status.json", "results.json", "metrics.jsonl") and is_shown
