"""`recmill prepare`: raw or synthetic data -> a prepared dataset."""

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recmill import registry
from recmill.config import plain
from recmill.data.opening import open_dataset
from recmill.datasets.writing import is_to_be_written, resumable_directory
from recmill.errors import ConfigError
from recmill.files.atomic import new_directory
from recmill.observe.progress import Progress

log = logging.getLogger(__name__)


def prepare(name: str, output: str | Path, *, overwrite: bool = False, **options: Any) -> dict[str, Any]:
    """Write dataset `name` to `output` and return its description. The same call again does nothing.

    Options are those of `recmill prepare NAME --help`, with underscores: prepare("synthetic-clicks", "d", rows=1000).
    """
    module = registry.load(registry.DATASETS, name, "dataset")
    checked = checked_options(name, module.Options, options)
    output = Path(output).absolute()
    plan = module.plan(checked) if hasattr(module, "plan") else None  # of a long preparation, which can be resumed
    recipe = plan.recipe if plan else checked.model_dump()
    if not is_to_be_written(output, name, recipe, overwrite):
        log.info("%s is already prepared: nothing to do", output)
    elif plan:
        with resumable_directory(output, recipe, plan.inputs, discard=overwrite) as work:
            module.write(plan, work) if name == "criteo" else module.write(work, plan)
        log.info("prepared %s in %s", name, output)
    else:
        with Progress(f"preparing {name}", total=1, unit="rows") as progress, new_directory(output) as partial:
            module.write(partial, checked, progress.callback())
        log.info("prepared %s in %s", name, output)
    description = open_dataset(output).description
    for note in description.notes:
        log.info("note: %s", note)
    return description.model_dump(mode="json")


def checked_options(name: str, options_class: Any, options: dict[str, Any]) -> Any:
    try:
        return options_class.model_validate_json(json.dumps(options, default=plain))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = str(problem["loc"][0]) if problem["loc"] else "options"
            if problem["type"] == "value_error":
                lines.append(str(problem["ctx"]["error"]))
            elif problem["type"] == "extra_forbidden":
                lines.append(registry.unknown(f"option of {name}", key, options_class.model_fields))
            else:
                message = problem["msg"].replace("Input should be", "should be")
                lines.append(f"--{key.replace('_', '-')}: {message}, got {problem['input']!r}.")
        raise ConfigError("\n".join(lines)) from None
