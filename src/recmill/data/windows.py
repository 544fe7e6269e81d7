"""Windows of user histories: which items a sequence model sees at once. No torch, so that models can import it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WindowRules:
    """How training examples are made from a history.

    A history is cut into windows of `max_length` items, backwards from its end, one every `step` items. With
    `asks_next` every item of a window is followed by a question for the next one, and nothing is masked. Otherwise
    items are masked as the remaining fields say.
    """

    max_length: int
    step: int
    probability: float  # that an item is masked
    last_only: float  # share of windows in which only the last item is masked, as in evaluation
    last_anywhere: bool = False  # shorten the `last_only` windows to a random length first
    last_too: bool = False  # in the other windows, always mask a history's last training item as well
    random: float = 0.0  # share of masked items that are replaced by a random item instead of the mask
    kept: float = 0.0  # share of masked items that stay visible
    copies: int = 1  # of each window in an epoch, each with its own masks
    asks_next: bool = False
    negatives: int = 0  # random items that all queries of a global batch share

    @property
    def window(self) -> int:
        """Items of a training example: those that the model sees, and with `asks_next` the last answer."""
        return self.max_length + self.asks_next


def train_windows(offsets: np.ndarray, rules: WindowRules, held_out: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, length) in items.npy of every training window; the last `held_out` items are in none."""
    begins = offsets[:-1]
    ends = offsets[1:] - held_out
    counts = 1 + -(-np.maximum(ends - begins - rules.window, 0) // rules.step)
    users = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0 is the newest of its history
    stops = ends[users] - numbers * rules.step
    starts = np.maximum(begins[users], stops - rules.window)
    return starts, stops - starts


def packed(items: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate items[start : start + length] of all rows; return also each item's row and distance to its end."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    from_end = np.cumsum(lengths)[rows] - 1 - np.arange(len(rows))
    positions = (starts + lengths - 1)[rows] - from_end
    return items[positions].astype(np.int64), rows, from_end


def ending_windows(
    items: np.ndarray, begins: np.ndarray, stops: np.ndarray, rules: WindowRules, mask_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens_N, lengths_B) from which a model predicts the item at each `stop` of items[begin:stop].

    The newest items that fit into `max_length`, followed by the mask in models that predict what is masked.
    """
    if rules.asks_next:
        lengths = np.minimum(stops - begins, rules.max_length)
        return packed(items, stops - lengths, lengths)[0], lengths
    lengths = np.minimum(stops - begins, rules.max_length - 1)
    tokens, _, _ = packed(items, stops - lengths, lengths)
    return np.insert(tokens, np.cumsum(lengths), mask_token), lengths + 1
