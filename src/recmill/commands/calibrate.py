"""`recmill plan --calibrate`: measure this machine, for plans of runs on machines like it."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from recmill.commands import assemble
from recmill.commands.plan import plan_case
from recmill.config import Config, load_config
from recmill.config.options import given_path
from recmill.errors import ConfigError, ResourceError, remedy_for
from recmill.files.atomic import write_text
from recmill.hardware.cpu import num_cores
from recmill.launch.local import run_job
from recmill.planning.devices import Device, Site, read_device
from recmill.planning.published import Sizes, described
from recmill.schema import Dataset
from recmill.tables.libraries import import_libraries

if TYPE_CHECKING:
    from recmill.planning.work import Work
    from recmill.world import World

_ROUNDS = 2
_TURNS = 12  # steps of each reference model in a round


def calibrate_machine(path: str | Path) -> Device:
    """Measure this machine, write its facts to a TOML file for `device`, and return them. Takes about a minute."""
    file = given_path(path, "--calibrate").absolute()
    if file.suffix != ".toml":
        raise ConfigError(f"--calibrate {path}: use a name that ends in .toml.")
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(f"--calibrate {path}: not the name of a file in an existing directory. Choose another.")
    import_libraries(in_own_process=False)
    from recmill.planning.calibrate import device_from, write_seconds
    from recmill.planning.work import Work

    try:
        write = write_seconds(file.parent)
    except OSError as error:
        problem = f"--calibrate {path}: a file cannot be written there: {error.strerror}."
        raise ResourceError(f"{problem} {remedy_for(error)}".rstrip()) from error
    procs = max(2, num_cores())
    # The steps of one process and of several in turns, so that another program slows both down.
    order = {"device": "cpu", "turns": _TURNS}
    rounds = [run_job("calibrate", dict(order), procs=count) for _ in range(_ROUNDS) for count in (1, procs)]

    def fastest(found: list[dict[str, Any]]) -> "list[tuple[Work, float]]":
        by_model = zip(*(one["steps"] for one in found), strict=True)
        return [(Work(**steps[0][0]), min(seconds for _, seconds in steps)) for steps in by_model]

    copy = min(one["copy"] for one in rounds)
    device = device_from(fastest(rounds[::2]), fastest(rounds[1::2]), procs, (copy, write))
    write_text(file, tomli_w.dumps(device.model_dump()))
    return device


def work(world: "World", turns: int) -> dict[str, Any]:
    """Measure the fastest step of each reference model, in turns; the first is a warm-up. All ranks take part."""
    from recmill.planning.calibrate import REFERENCES, copy_seconds
    from recmill.planning.work import step_work

    site = Site(1, world.size, read_device("cpu"))
    steps, works = [], []
    for reference in REFERENCES:
        config = load_config(reference.config(world.size))
        sizes = Sizes([reference.rows] * reference.tables, ids_per_row=[reference.ids] * reference.tables)
        dataset = described(sizes, "clicks", "none")
        steps.append(_reference_step(config, dataset, world))
        works.append(asdict(step_work(plan_case(config, dataset, site))))
    fastest = [float("inf")] * len(steps)
    for turn in range(turns):
        for number, step in enumerate(steps):
            world.sum([0.0])  # all ranks begin together
            start = time.perf_counter()
            step()
            fastest[number] = min(fastest[number], time.perf_counter() - start) if turn else fastest[number]
    return {"steps": [*zip(works, fastest, strict=True)], "copy": copy_seconds()}


def _reference_step(config: Config, dataset: Dataset, world: "World") -> Callable[[], None]:
    """Return a function that trains one step on random rows."""
    import numpy as np
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recmill.batch import CtrBatch
    from recmill.training.optim import build_optimizer

    model = assemble.build_sharded(config, dataset, world)
    optimizer = build_optimizer(model, config.settings.optim)
    task = assemble.task_module(config)
    description = dataset.clicks
    count = config.settings.train.global_batch_size // world.size
    random = np.random.default_rng(world.rank)
    ids = [  # by Zipf's law, as in real logs
        np.minimum(np.exp(random.random(count * number) * np.log(f.rows + 1)).astype(np.int64), f.rows) - 1
        for f, number in zip(description.sparse, description.ids_per_row, strict=True)
    ]
    lengths = torch.tensor(np.repeat(description.ids_per_row, count), dtype=torch.int32)
    names = [feature.name for feature in description.sparse]
    sparse = KeyedJaggedTensor.from_lengths_sync(names, torch.from_numpy(np.concatenate(ids)), lengths)
    dense = torch.rand(count, len(description.dense))
    batch = CtrBatch(dense, sparse, (dense[:, 0] < 0.25).float(), torch.ones(count))

    def step() -> None:
        optimizer.zero_grad()
        (task.loss_sum(model, batch) / count).backward()
        optimizer.step()

    return step
