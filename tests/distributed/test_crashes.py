"""A few kills at random moments; `make crashtest` makes as many as one likes, of both kinds of model."""

import random
from pathlib import Path

import pytest

from recmill.tables.stores.row_file import file_system

from ..crashtest import crash


@pytest.mark.timeout(900)  # half a minute where cores are free
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(tmp_path: Path) -> None:
    tally = crash(tmp_path, ["dlrm"], rounds=3, steps=80, choice=random.Random(8))
    assert not tally.wrong
    assert tally.kills == 3
    assert tally.runs
    assert tally.resumed


@pytest.mark.timeout(900)
def test_a_killed_run_with_tables_in_files_ends_like_one_in_memory_that_never_was(tmp_path: Path) -> None:
    """Killed at points of the store's work, or at random moments."""
    if file_system(tmp_path) == "tmpfs":
        pytest.skip(f"{tmp_path} is in memory, where cached_ssd refuses to keep rows: choose a disk with --basetemp")
    tally = crash(tmp_path, ["dlrm"], rounds=2, steps=60, choice=random.Random(7), store="cached_ssd")
    assert not tally.wrong
    assert tally.kills  # at most two: a process may never get to the point where it is to kill itself
    assert tally.runs
