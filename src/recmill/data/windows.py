"""Windows of user histories: which items a sequence model sees at once. No torch, so that models can import it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WindowRules:
    """How training examples are made from a history.

    Windows of up to `max_length` items are taken backwards from the history's end, one every `step` items. The network
    predicts the next item at every position (`predicts_next`), or items that are masked as the other fields say.
    """

    max_length: int
    step: int
    probability: float  # that an item is masked
    last_only: float  # share of windows in which only the last item is masked, as in evaluation
    last_anywhere: bool = False  # shorten the `last_only` windows to a random length first
    last_too: bool = False  # in the other windows, always mask a history's last training item too
    random: float = 0.0  # share of masked items that are replaced by a random item instead of the mask
    kept: float = 0.0  # share of masked items that stay visible
    copies: int = 1  # of each window in an epoch, each with its own masks
    predicts_next: bool = False
    negatives: int = 0  # random items that all queries of a global batch share


def train_windows(offsets: np.ndarray, rules: WindowRules, held_out: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, length) in items.npy of every training window; none has the last `held_out` items of a history."""
    window = rules.max_length + rules.predicts_next  # one more item, which is only an answer
    begins = offsets[:-1]
    ends = offsets[1:] - held_out
    counts = 1 + -(-np.maximum(ends - begins - window, 0) // rules.step)
    users = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0 is the newest of its history
    stops = ends[users] - numbers * rules.step
    starts = np.maximum(begins[users], stops - window)
    return starts, stops - starts


def packed(items: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate items[start : start + length] of all rows; also return each item's row and distance to its end."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    from_end = np.cumsum(lengths)[rows] - 1 - np.arange(len(rows))
    positions = (starts + lengths - 1)[rows] - from_end
    return items[positions].astype(np.int64), rows, from_end


def ending_windows(
    items: np.ndarray, begins: np.ndarray, stops: np.ndarray, rules: WindowRules, mask_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens_N, lengths_B) from which a model predicts the item that follows each history items[begin:stop].

    They are the newest items that fit into `max_length`, and the mask unless the model `predicts_next`.
    """
    num_masks = 0 if rules.predicts_next else 1
    lengths = np.minimum(stops - begins, rules.max_length - num_masks)
    tokens, _, _ = packed(items, stops - lengths, lengths)
    if num_masks:
        tokens = np.insert(tokens, np.cumsum(lengths), mask_token)
    return tokens, lengths + num_masks
