"""`recmill trace`: what all processes of a run did, as one timeline for Perfetto."""

from pathlib import Path

from recmill.commands.options import flag
from recmill.config.options import given_path
from recmill.config.sections import Section
from recmill.errors import ConfigError, DataError
from recmill.files.atomic import new_file
from recmill.observe.run_dir import RunDirectory
from recmill.observe.timeline import Merged, merge_dftracer, merge_run


class Options(Section):
    source: str | None = flag(None, "Merge the .pfw files of DFTracer in DIR instead.", "--from", metavar="DIR")
    output: str | None = flag(
        None, "File to write.  [default: RUN/trace.json.gz, or DIR/trace.json.gz]", metavar="FILE"
    )


def trace(run: str | Path | None = None, *, source: str | None = None, output: str | Path | None = None) -> Merged:
    """Merge what the ranks of `run` recorded, or the files of DFTracer in the directory `source`, into one file."""
    if (run is None) == (source is None):
        raise ConfigError("Name a run, or a directory with files of DFTracer after --from, not both.")
    folder = given_path(run, "RUN") if run is not None else given_path(source or "", "--from")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a directory. Name {'a run' if run else 'the directory of .pfw files'}.")
    path = given_path(output, "--output").absolute() if output is not None else (folder / "trace.json.gz").absolute()
    recorded = RunDirectory(folder).trace
    if run is not None and not recorded.is_dir():
        raise DataError(f"{folder}: nothing was recorded here. Name a run; observe.record = false records nothing.")
    with new_file(path) as partial:
        return merge_dftracer(folder, path, partial) if run is None else merge_run(recorded, path, partial)
