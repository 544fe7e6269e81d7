from pathlib import Path

import polars as pl
import pytest

from recmill.data.parquet_files import reading
from recmill.errors import DataError


def test_a_panic_of_polars_is_a_data_error_that_names_the_file(tmp_path: Path) -> None:
    """A corrupt footer makes Polars panic, which is no `Exception`."""
    file = tmp_path / "day.parquet"
    file.touch()
    fact = rf"{file}: not a Parquet file that can be read \(index out of range\)\. Get it again\."
    with pytest.raises(DataError, match=fact), reading(file, "Get it again."):
        raise pl.exceptions.PanicException("index out of range\nin a thread")


def test_a_corrupt_file_is_a_data_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "day.parquet"
    file.write_bytes(b"PAR1 and no footer")
    with pytest.raises(DataError, match=rf"{file}: not a Parquet file that can be read"), reading(file):
        pl.read_parquet(file)


def test_a_missing_file_has_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), reading(tmp_path / "none.parquet"):
        pass
