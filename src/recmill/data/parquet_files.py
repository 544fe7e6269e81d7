"""What Polars raises for a Parquet file that it cannot read, as a DataError that names the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recmill.errors import DataError


@contextmanager
def reading(path: Path, remedy: str = "Prepare it again.") -> Iterator[None]:
    """Convert the errors of Polars within the block, panics included, which are no `Exception`."""
    import polars as pl

    with path.open("rb"):  # an OSError of Polars has no errno
        pass
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        fact = str(error).partition("\n")[0]
        raise DataError(f"{path}: not a Parquet file that can be read ({fact}). {remedy}") from None
