import numpy as np
import pytest
import torch
from torch import Tensor

from recmill import rng
from recmill.nn.dropout import RowDropout
from recmill.nn.rows import Rows

KEYS = torch.from_numpy(rng.bits(np.uint64(0), np.arange(1, 6)).view(np.int64))


def rows_of(lengths: list[int], keys: Tensor) -> Rows:
    num_tokens = sum(lengths)
    return Rows(torch.tensor(lengths), max(lengths), torch.arange(num_tokens), keys, num_tokens)


def dropped(probability: float, site: int, keys: Tensor, length: int = 200, dim: int = 16) -> Tensor:
    rows = rows_of([length] * len(keys), keys)
    return RowDropout(probability, site)(torch.ones(len(keys) * length, dim), rows).view(len(keys), length, dim)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("site", [0, 1, 7])
def test_dropout_drops_its_share_of_every_row_and_scales_up_the_rest(probability: float, site: int) -> None:
    out = dropped(probability, site, KEYS)
    assert torch.unique(out).tolist() == pytest.approx([0.0, 1 / (1 - probability)])
    assert (out == 0).float().mean(dim=(1, 2)).tolist() == pytest.approx([probability] * len(KEYS), abs=0.03)


def test_dropout_does_nothing_in_evaluation_or_with_probability_0() -> None:
    x, rows = torch.randn(15, 4), rows_of([3] * 5, KEYS)
    assert RowDropout(0.5, site=1).eval()(x, rows) is x
    assert RowDropout(0.0, site=1)(x, rows) is x


def test_dropout_masks_of_two_keys_or_two_sites_are_unrelated() -> None:
    """Independent masks of probability 1/2 agree in half of the 3,200 elements."""
    masks = [dropped(0.5, site, KEYS)[row] == 0 for site in range(4) for row in range(len(KEYS))]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert (one == other).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_neighbouring_elements_are_dropped_independently() -> None:
    mask = (dropped(0.5, 0, KEYS) == 0).flatten(1)
    for distance in (1, 2, 16, 32):
        agree = (mask[:, distance:] == mask[:, :-distance]).float().mean()
        assert agree.item() == pytest.approx(0.5, abs=0.03)


def test_dropout_repeats_itself_and_follows_its_row_through_any_batch() -> None:
    out = dropped(0.5, 3, KEYS)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(dropped(0.5, 3, KEYS), out)
    assert torch.equal(dropped(0.5, 3, KEYS[order]), out[order])
    assert torch.equal(dropped(0.5, 3, KEYS[2:3]), out[2:3])


def test_dropout_masks_are_aligned_at_the_end_of_a_row() -> None:
    short, long = dropped(0.5, 2, KEYS, length=7), dropped(0.5, 2, KEYS, length=19)
    assert torch.equal(long[:, -7:], short)
