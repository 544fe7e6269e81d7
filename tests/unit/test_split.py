import gzip
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from recmill.commands import split as split_module
from recmill.commands.split import split
from recmill.errors import ConfigError, DataError, UserError

from ..conftest import RunCli

LINES = [f"{number}\tabc".encode() + b"\n" for number in range(23)]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture
def day_0(tmp_path: Path) -> Path:
    file = tmp_path / "raw" / "day_0"
    file.parent.mkdir()
    file.write_bytes(b"".join(LINES))
    return file


def parts(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def is_untouched(tmp_path: Path) -> bool:
    return [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("block_bytes", [1, 16, 1 << 20])
def test_the_first_slices_are_kept_and_the_rest_is_left_out(
    suffix: str, block_bytes: int, day_0: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_module, "_BLOCK_BYTES", block_bytes)
    raw = day_0.with_name(f"log{suffix}")
    raw.write_bytes(COMPRESS[suffix](b"".join(LINES)))
    done = split(raw, tmp_path / "days", lines=5, days=3)
    assert parts(tmp_path / "days") == {f"day_{d}": b"".join(LINES[5 * d : 5 * d + 5]) for d in range(3)}
    assert done == {"input": str(raw), "days": 3, "lines": 15, "has_rest": True}


def test_the_log_says_how_many_lines_were_written(
    day_0: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    split(day_0, tmp_path / "days", lines=5, days=3)
    split(day_0, tmp_path / "all", lines=5, days=5)
    assert "15 lines written" in caplog.messages[0]
    assert "the rest was left out" in caplog.messages[0]
    assert "23 lines written" in caplog.messages[1]
    assert "nothing was left out" in caplog.messages[1]


def test_the_last_slice_may_be_shorter(day_0: Path, tmp_path: Path) -> None:
    split(day_0, tmp_path / "days", lines=5, days=5)
    assert parts(tmp_path / "days")["day_4"] == b"".join(LINES[20:])


@pytest.mark.parametrize(("lines", "has_rest"), [(23, False), (22, True)])
def test_a_last_line_without_a_newline_is_a_line(lines: int, has_rest: bool, day_0: Path, tmp_path: Path) -> None:
    day_0.write_bytes(day_0.read_bytes()[:-1])
    assert split(day_0, tmp_path / "days", lines=lines, days=1)["has_rest"] == has_rest
    assert parts(tmp_path / "days")["day_0"] == b"".join(LINES[:lines])[: None if has_rest else -1]


def test_days_that_would_be_empty_are_an_error_that_says_what_fits(day_0: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 23 lines: .* --lines 3 or --days 5"):
        split(day_0, tmp_path / "days", lines=5, days=6)
    with pytest.raises(ConfigError, match="slices of 9,223,372,036,854,775,808 do not fill 2 days"):
        split(day_0, tmp_path / "days", lines=2**63, days=2)
    assert is_untouched(tmp_path)
    assert split(day_0, tmp_path / "three", lines=3, days=6)["lines"] == 18
    assert split(day_0, tmp_path / "five", lines=5, days=5)["lines"] == 23


@pytest.mark.parametrize(
    ("content", "kind", "remedy"), [(b"", DataError, "longer log"), (b"a\nb", ConfigError, "--lines 1 --days 2")]
)
def test_fewer_lines_than_days_is_an_error(
    content: bytes, kind: type[UserError], remedy: str, day_0: Path, tmp_path: Path
) -> None:
    day_0.write_bytes(content)
    with pytest.raises(kind, match=remedy):
        split(day_0, tmp_path / "days", lines=1, days=3)


def test_a_log_that_is_cut_short_leaves_nothing_behind(day_0: Path, tmp_path: Path) -> None:
    raw = day_0.with_suffix(".gz")
    raw.write_bytes(gzip.compress(day_0.read_bytes())[:-20])
    with pytest.raises(DataError, match="cut short"):
        split(raw, tmp_path / "days", lines=5, days=4)
    assert is_untouched(tmp_path)


def test_what_is_there_already_is_not_touched(day_0: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not an empty directory"):
        split(day_0, day_0.parent, lines=5, days=2)
    with pytest.raises(DataError, match="not an empty directory"):
        split(day_0, day_0, lines=5, days=2)
    assert parts(day_0.parent) == {"day_0": b"".join(LINES)}


def test_options_and_input_are_checked_first(day_0: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--days: should be greater than 0, got 0"):
        split(day_0, tmp_path / "days", lines=5, days=0)
    with pytest.raises(ConfigError, match=r"unknown argument of split 'day'\. Did you mean 'days'"):
        split(day_0, tmp_path / "days", day=5)  # type: ignore[call-arg]
    with pytest.raises(DataError, match="no such file"):
        split(tmp_path / "day_1", tmp_path / "days", lines=5, days=2)


def test_the_command_does_the_same(day_0: Path, tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("split", "--input", day_0, "--output", "days", "--lines", "10", "--days", "2")
    assert done.returncode == 0, done.stderr
    assert "20 lines written" in done.stderr
    assert parts(tmp_path / "days")["day_1"] == b"".join(LINES[10:20])
    assert run_cli("split", "--input", day_0, "--output", "days", "--lines", "10").returncode == 3
