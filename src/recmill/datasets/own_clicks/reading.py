"""Read the files of an own click log, block by block."""

from collections.abc import Iterator

from recmill.datasets.compressed import InputFile
from recmill.datasets.inputs.reading import frames
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.own_clicks.values import RawRows


def read(file: InputFile, section: InputSection, columns: list[str], prefix: str = "input.") -> Iterator[RawRows]:
    """Yield these columns of all rows, in order. Every row is checked to have all fields."""
    first = 1
    for frame in frames(file, section, columns, prefix):
        yield RawRows(frame, str(file), range(first, first + frame.height))
        first += frame.height
