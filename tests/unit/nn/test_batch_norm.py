"""Batch normalization against torch's own; for processes see also tests/distributed/test_optim.py."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from recmill.nn.batch_norm import BatchNorm
from recmill.nn.dropout import RowDropout
from recmill.nn.mlp import Regularization, mlp


def adder(ranks: int) -> Callable[[Tensor], Tensor]:
    """Add tensors over threads, each of which stands for a rank."""
    barrier, given = threading.Barrier(ranks), {}

    def add(values: Tensor) -> Tensor:
        given[threading.get_ident()] = values
        barrier.wait()
        total = torch.stack(list(given.values())).sum(0)
        barrier.wait()
        return total

    return add


def test_rows_of_three_ranks_and_their_fillers_are_normalized_as_by_torch_in_one_process() -> None:
    """Shares of 4, 3 and 0 rows; the last two have fillers, with values and without gradients."""
    torch.manual_seed(1)
    rows, upstream = torch.randn(7, 5) * 3 + 2, torch.randn(7, 5)
    theirs = nn.BatchNorm1d(5)
    nn.init.normal_(theirs.weight)
    whole = rows.clone().requires_grad_()
    expected = theirs(whole)
    expected.backward(upstream)
    add = adder(3)
    shares = [(rows[:4], upstream[:4], 4), (rows[4:], upstream[4:], 3), (rows[:0], upstream[:0], 0)]
    found: dict[int, tuple[BatchNorm, Tensor, Tensor]] = {}

    def run(rank: int) -> None:
        own, gradient, real = shares[rank]
        layer = BatchNorm(5)
        layer.weight.data.copy_(theirs.weight.data)
        layer.add = add
        fillers = 4 - real
        x = torch.cat([own, torch.full((fillers, 5), 9.0)]).requires_grad_()
        out = layer(x, torch.tensor([7] * real + [-1] * fillers))
        out.backward(torch.cat([gradient, torch.zeros(fillers, 5)]))
        assert x.grad is not None
        assert not x.grad[real:].any()
        found[rank] = layer, out[:real].detach(), x.grad[:real]

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    torch.testing.assert_close(torch.cat([found[rank][1] for rank in range(3)]), expected.detach())
    torch.testing.assert_close(torch.cat([found[rank][2] for rank in range(3)]), whole.grad)
    for name in ("weight", "bias"):
        total = sum(getattr(layer, name).grad for layer, _, _ in found.values())
        torch.testing.assert_close(total, getattr(theirs, name).grad)
    for layer, _, _ in found.values():
        torch.testing.assert_close(layer.running_mean, theirs.running_mean)
        torch.testing.assert_close(layer.running_var, theirs.running_var)
        torch.testing.assert_close(layer.eval()(rows), theirs.eval()(rows))


def test_an_mlp_in_one_process_equals_torch_s_layers_and_a_batch_of_one_row_leaves_no_nan() -> None:
    torch.manual_seed(1)
    ours = mlp(3, [8, 6], others=Regularization(batch_norm=True))
    linears = [layer for layer in ours if isinstance(layer, nn.Linear)]
    theirs = nn.Sequential(linears[0], nn.BatchNorm1d(8), nn.ReLU(), linears[1], nn.BatchNorm1d(6), nn.ReLU())
    for _ in range(3):
        x = torch.randn(10, 3)
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    ours.train()(x[:1])
    assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


def test_dropout_of_an_mlp_depends_on_the_row_and_the_layer_but_not_on_the_batch() -> None:
    layers = mlp(4, [64, 64], others=Regularization(dropout=0.25, first_site=3))
    x, keys = torch.ones(40, 4), torch.arange(40)
    out = layers(x, keys)
    torch.testing.assert_close(torch.cat([layers(x[:7], keys[:7]), layers(x[7:], keys[7:])]), out)
    assert not torch.equal(layers(x, keys + 1), out)
    one, other = (layer for layer in layers if isinstance(layer, RowDropout))
    first = one.of_vectors(torch.ones(40, 64), keys)
    assert abs(float((first == 0).float().mean()) - 0.25) < 0.03
    assert not torch.equal(other.of_vectors(torch.ones(40, 64), keys), first)
    assert torch.equal(layers.eval()(x), layers.eval()(x, keys + 1))
