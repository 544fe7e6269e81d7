import numpy as np
import pytest
import torch
from torch import Tensor

from recmill import rng
from recmill.hardware.cpu import cxx_compiler
from recmill.nn import dropout
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
    assert RowDropout(1e-17, site=1)(x, rows) is x  # too small to be subtracted from 1


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


def lowbias32(x: np.ndarray) -> np.ndarray:
    """Wellons' hash, in unsigned numbers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def factors_by_numpy(lengths: list[int], dim: int, probability: float, site: int) -> np.ndarray:
    """What each element is multiplied with, [N, D]: elements are counted from the end of their row."""
    folded = KEYS.numpy() ^ (KEYS.numpy() >> 32)
    keys = lowbias32(folded.astype(np.uint32) + np.uint32(site * 0x3C6EF372 % 2**32))
    of_rows = [
        lowbias32(key + np.arange(length * dim - 1, -1, -1, dtype=np.uint32) * np.uint32(0x9E3779B9))
        for key, length in zip(keys, lengths, strict=True)
    ]
    threshold = int((1 - probability) * 2.0**32) - (1 << 31)
    is_kept = np.concatenate(of_rows).reshape(-1, dim).view(np.int32) < threshold
    return is_kept * np.float32(1 / (1 - probability))


def fails(*values: Tensor, **options: Tensor) -> Tensor:
    raise RuntimeError("Cannot find a working triton installation.\nMore details.")


@pytest.mark.parametrize("way", ["on CPU", "on a GPU", "on a GPU without compiler"])
def test_every_way_of_dropping_gives_the_bits_of_the_same_hash_in_numpy(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For GPUs it is compiled to one kernel, here by torch's compiler for CPUs. Their mask is computed twice."""
    if way == "on a GPU" and cxx_compiler() is None:
        pytest.skip("torch's compiler for CPUs needs a C++ compiler")
    caplog.set_level("WARNING")
    dropout._fused.cache_clear()
    monkeypatch.setattr(dropout, "_is_on_gpu", lambda x: way != "on CPU")
    if way == "on a GPU without compiler":
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: fails)
    lengths, dim, probability, site = [3, 9, 1, 30, 4], 40, 0.2, 5  # more dims than a vector of the CPU holds
    torch.manual_seed(0)
    x, grad = torch.randn(2, sum(lengths), dim)
    x.requires_grad_()
    out = RowDropout(probability, site)(x, rows_of(lengths, KEYS))
    out.backward(grad)
    factors = torch.from_numpy(factors_by_numpy(lengths, dim, probability, site))
    assert_same_bits(out, x * factors)
    assert x.grad is not None
    assert_same_bits(x.grad, grad * factors)
    reason = "Cannot find a working triton installation."
    warning = f"dropout takes 30 GPU kernels instead of one, because torch.compile failed: {reason}"
    assert caplog.messages == ([warning] if way == "on a GPU without compiler" else [])


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))  # also the sign of 0
