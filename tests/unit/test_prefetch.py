import threading
from collections.abc import Iterator

import pytest

from recmill.errors import DataError
from recmill.training.prefetch import prefetched


def numbers(until: int, made: list[int], error: Exception | None = None) -> Iterator[int]:
    for number in range(until):
        made.append(number)
        yield number
    if error:
        raise error


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_the_same_batches_come_in_the_same_order(ahead: int) -> None:
    with prefetched(numbers(20, []), ahead) as batches:
        assert list(batches) == list(range(20))
    assert threads() == []


@pytest.mark.parametrize("ahead", [1, 4])
def test_at_most_n_batches_are_made_ahead(ahead: int) -> None:
    made: list[int] = []
    with prefetched(numbers(100, made), ahead) as batches:
        for used in range(10):
            assert next(batches) == used
            assert len(made) <= used + 1 + ahead
    assert len(made) <= 10 + ahead
    assert threads() == []


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_comes_after_the_good_batches_with_its_own_type(ahead: int) -> None:
    found = []
    with (
        pytest.raises(DataError, match="row 7"),
        prefetched(numbers(5, [], DataError("row 7 is bad")), ahead) as batches,
    ):
        for number in batches:
            found.append(number)
    assert found == [0, 1, 2, 3, 4]
    assert threads() == []


def test_an_error_of_the_user_of_the_batches_ends_the_thread() -> None:
    with pytest.raises(ZeroDivisionError), prefetched(numbers(10**9, []), 2) as batches:
        next(batches)
        raise ZeroDivisionError
    assert threads() == []
