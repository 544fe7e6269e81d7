"""`recmill prepare`: raw or synthetic data -> a prepared dataset."""

import logging
from pathlib import Path
from typing import Any, cast

from recmill import registry
from recmill.config.options import checked_options, given_path
from recmill.data.frames import as_polars, is_frame
from recmill.data.opening import open_dataset
from recmill.datasets.protocol import DatasetModule, FrameModule
from recmill.datasets.writing import needs_writing, remove_finished_work, resumable_directory
from recmill.errors import ConfigError

log = logging.getLogger(__name__)


def prepare(name: str, output: str | Path, *, overwrite: bool = False, **options: Any) -> dict[str, Any]:
    """Write dataset `name` to `output` and return its description; an identical dataset there is left as it is.

    Options are those of `recmill prepare NAME --help`, with underscores: prepare("synthetic-clicks", "d", rows=1000).
    An interrupted call, repeated, resumes. `input` of "histories" may be a frame of pandas, Polars or Arrow.
    """
    module = cast(DatasetModule, registry.load(registry.DATASETS, name, "dataset"))
    frame = options.get("input") if is_frame(options.get("input")) else None
    if frame is not None and not hasattr(module, "plan_frame"):
        raise ConfigError(f"{name}: `input` is a path, not a frame. Frames are for 'histories'.")
    checked = checked_options(name, module.Options, options if frame is None else {**options, "input": "frame"})
    log.info("preparing %s in %s", name, output)
    if frame is None:
        plan = module.plan(checked)
    else:
        plan = cast(FrameModule, module).plan_frame(checked, as_polars(frame, "input"))
    output = given_path(output, "--output").absolute()
    if needs_writing(output, name, plan.recipe, overwrite):
        with resumable_directory(output, plan.recipe, plan.inputs, discard=overwrite) as work:
            module.write(plan, work)
        log.info("prepared %s in %s", name, output)
    else:
        remove_finished_work(output)
        log.info("%s is already prepared: nothing to do", output)
    description = open_dataset(output).description
    for note in description.notes:
        log.info("note: %s", note)
    return description.model_dump(mode="json")
