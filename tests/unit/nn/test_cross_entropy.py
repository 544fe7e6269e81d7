import contextlib

import pytest
import torch
from torch.nn import functional as F

from recmill.nn.cross_entropy import cross_entropy_sum, queries_per_chunk

from ...dispatch import Counted

NUM_ITEMS = 20


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("per_chunk", [1, 3 * NUM_ITEMS, 1 << 20])
def test_cross_entropy_in_chunks_is_torchs_summed_and_ignores_fillers(
    per_chunk: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.nn.cross_entropy._LOGITS_PER_CHUNK_ON_CPU", per_chunk)
    torch.manual_seed(0)
    queries, weight, bias = torch.randn(7, 5), torch.randn(NUM_ITEMS, 5), torch.randn(NUM_ITEMS)
    answers, weights = torch.randint(0, NUM_ITEMS, (7,)), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5, 1.0])
    inputs = [value.requires_grad_() for value in (queries, weight, bias)]
    losses = F.cross_entropy(F.linear(queries, weight, bias), answers, reduction="none", label_smoothing=smoothing)
    expected = (losses * weights).sum()
    found = cross_entropy_sum(queries, weight, bias, answers, weights, smoothing)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs))


@pytest.mark.parametrize(
    ("num_items", "device", "queries"),
    [(3706, "cpu", 282), (3706, "cuda", 18108), (10**6, "cpu", 1), (10**6, "cuda", 67), (10**8, "cuda", 1)],
)
def test_chunks_fill_a_cache_on_cpu_and_256_mb_on_a_gpu(num_items: int, device: str, queries: int) -> None:
    """By hand: 2^20 and 2^26 logits of 4 bytes."""
    assert queries_per_chunk(num_items, torch.device(device)) == queries


def test_a_million_items_take_a_gpu_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 queries in 15 chunks of 67. The meta device stands for the GPU; autocast does not know it."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    queries, weight, bias, weights = (torch.empty(size, device="meta") for size in ((1000, 8), (10**6, 8), 10**6, 1000))
    answers = torch.empty(1000, dtype=torch.int64, device="meta")
    with Counted() as counted:
        cross_entropy_sum(queries.requires_grad_(), weight, bias, answers, weights, smoothing=0.1).backward()
    assert counted.kernels["logsumexp"] == 15
    assert counted.kernels.total() == 15 * 21 + 7
    assert not counted.waits
