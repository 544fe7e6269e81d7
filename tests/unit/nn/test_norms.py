import torch
from torch.nn import functional as F

from recmill.nn.norms import WindowNorm
from recmill.nn.rows import Rows


def test_a_window_norm_is_torchs_over_positions_and_dims() -> None:
    torch.manual_seed(0)
    norm = WindowNorm(4, 8)
    with torch.no_grad():
        norm.weight.add_(torch.randn(4, 8))
        norm.bias.add_(torch.randn(4, 8))
    x = torch.randn(6, 8)
    rows = Rows(torch.tensor([4, 2]), 4, torch.arange(6), torch.zeros(2, dtype=torch.int64), num_tokens=6)
    padded = torch.stack([x[:4], torch.cat([torch.zeros(2, 8), x[4:]])])
    expected = F.layer_norm(padded, (4, 8), norm.weight, norm.bias)
    torch.testing.assert_close(norm(x, rows), torch.cat([expected[0], expected[1, 2:]]))
