"""`recmill schema`: guess what the columns of a click log are, and write a schema to edit."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Overwrite, flag, new_path
from recmill.config.options import checked_options
from recmill.data.frames import as_polars, is_frame
from recmill.datasets.inputs.flags import Reading, ReadingFlags, check_no_flags
from recmill.errors import ConfigError
from recmill.files.atomic import write_text
from recmill.observe.printed import Printed, print_guess

if TYPE_CHECKING:
    from recmill.data.frames import AnyFrame


class Options(ReadingFlags):
    input: str = flag(..., "The log: a file, a directory, or a pattern in quotes, like 'logs/*.csv'.")
    label: str | None = flag(None, "The column that says whether a row was clicked.")
    output: str | None = flag(None, "The file to write, like clicks.toml.  [default: the schema is only printed]")
    overwrite: Overwrite = False


@checked_keywords
def guess_schema(
    input: "str | Path | AnyFrame",
    label: str | None = None,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    **reading: Unpack[Reading],
) -> dict[str, Any]:
    """Return {"schema": the text of the schema, "columns": [{"column", "guess", "why"}, ...], "input": the log,
    "output": where the schema was written, or None}. `input` may be a frame of pandas, Polars or Arrow.

    The guesses are made from the first rows of each file, 40,000 in all. The label is never guessed.
    """
    from recmill.datasets.compressed import InputFile
    from recmill.datasets.inputs.detection import described
    from recmill.datasets.inputs.files import found_files
    from recmill.datasets.inputs.frame import FrameFile
    from recmill.datasets.own_clicks.guessing import as_toml, guess

    if not is_frame(input) and not isinstance(input, str | Path):
        raise ConfigError(f"`input` is a {type(input).__name__}. Give a path, or a frame of pandas, Polars or Arrow.")
    if is_frame(input):
        check_no_flags(reading)
    path = new_path(output, "--output", overwrite) if output is not None else None
    files: list[InputFile]
    files = [FrameFile(as_polars(input, "input"))] if is_frame(input) else found_files(str(input))
    section = described(files[0], **checked_options("schema", ReadingFlags, {**reading}).given())
    section, clicks, guesses = guess(files, label, section)
    assert label
    text = as_toml(section, clicks, guesses)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    rows = [{"column": label, "guess": "label", "why": clicks.why}]
    rows += [{"column": found.column, "guess": found.kind, "why": found.why} for found in guesses]
    found = {"schema": text, "columns": rows, "input": "frame" if is_frame(input) else str(input)}
    return Printed({**found, "output": str(output) if path else None}, print_guess)
