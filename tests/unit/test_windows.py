import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill.data.windows import WindowRules, ending_windows, train_windows
from recmill.models import bert4rec


@pytest.mark.parametrize(
    ("lengths", "step", "expected"),
    [
        ([3], 4, [(0, 1)]),  # one item is left for training
        ([6], 4, [(0, 4)]),  # exactly a window
        ([7], 4, [(1, 4), (0, 1)]),  # the oldest window takes what is left
        ([10], 4, [(4, 4), (0, 4)]),
        ([10], 3, [(4, 4), (1, 4), (0, 2)]),
        ([10], 1, [(4, 4), (3, 4), (2, 4), (1, 4), (0, 4)]),
        ([5, 3, 8], 4, [(0, 3), (5, 1), (10, 4), (8, 2)]),  # never across two users
    ],
)
def test_windows_are_cut_backwards_from_the_last_training_item(
    lengths: list[int], step: int, expected: list[tuple[int, int]]
) -> None:
    offsets = np.cumsum([0, *lengths])
    starts, counts = train_windows(offsets, WindowRules(max_length=4, step=step, probability=0.2, last_only=0.0))
    assert list(zip(starts.tolist(), counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("items", "max_length", "sliding_step", "expected"),
    [
        # The starts of TorchRec's BERT4Rec example, whose step is a tenth of max_length.
        (250, 100, 0.1, list(range(150, -1, -10))),
        (12, 10, 0.1, [2, 1, 0]),
        (10, 10, 0.1, [0]),
        (7, 10, 0.1, [0]),
        (255, 100, 0.1, [*range(155, 0, -10), 0]),
        (8, 5, 0.1, [3, 2, 1, 0]),  # a tenth of 5 is less than an item
        (25, 10, 4, [15, 11, 7, 3, 0]),
        (25, 10, 0, [15, 5, 0]),
    ],
)
def test_the_sliding_step_is_a_number_of_items_or_a_share_of_max_length(
    items: int, max_length: int, sliding_step: float, expected: list[int]
) -> None:
    config = bert4rec.Config(max_length=max_length, sliding_step=sliding_step)
    starts, _ = train_windows(np.array([0, items + 2]), bert4rec.window_rules(config))
    assert starts.tolist() == expected


@settings(derandomize=True, deadline=None)
@given(lengths=st.lists(st.integers(3, 40), min_size=1, max_size=6), max_length=st.integers(2, 12), data=st.data())
def test_windows_hold_every_training_item_and_never_the_last_two(
    lengths: list[int], max_length: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(1, max_length))
    offsets = np.cumsum([0, *lengths])
    starts, counts = train_windows(offsets, WindowRules(max_length, step, probability=0.2, last_only=0.0))
    assert counts.min() >= 1
    assert counts.max() <= max_length
    covered = {int(p) for start, count in zip(starts, counts, strict=True) for p in range(start, start + count)}
    held_out = {int(end) - from_end for end in offsets[1:] for from_end in (1, 2)}
    assert covered == set(range(int(offsets[-1]))) - held_out


@pytest.mark.parametrize(
    ("predicts_next", "tokens", "lengths"),
    [
        (False, [7, 6, 99, 9, 99, 2, 1, 99], [3, 2, 3]),
        (True, [8, 7, 6, 9, 3, 2, 1], [3, 1, 3]),
    ],
)
def test_a_model_sees_the_newest_items_before_the_target_and_perhaps_the_mask(
    predicts_next: bool, tokens: list[int], lengths: list[int]
) -> None:
    """Histories of 3 items, 1 item and 6 items; the last one ends where the array does."""
    items = np.array([8, 7, 6, 9, 0, 6, 5, 4, 3, 2, 1], np.int32)
    rules = WindowRules(max_length=3, step=3, probability=0.0, last_only=0.0, predicts_next=predicts_next)
    found = ending_windows(items, np.array([0, 3, 5]), np.array([3, 4, 11]), rules, mask_token=99)
    assert [part.tolist() for part in found] == [tokens, lengths]
    assert found[0].dtype == np.int64
