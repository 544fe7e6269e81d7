"""Bidirectional transformer encoder over left-padded rows."""

from torch import Tensor, nn
from torch.nn import functional as F

from recmill.nn.dropout import RowDropout


class EncoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input. Attention weights themselves are not dropped."""

    def __init__(self, dim: int, num_heads: int, dropout: float, site: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.attention_dropout, self.feed_dropout = RowDropout(dropout, site), RowDropout(dropout, site + 1)

    def forward(self, x_BTD: Tensor, may_see_B11T: Tensor, row_keys_B: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self._attend(self.attention_norm(x_BTD), may_see_B11T), row_keys_B)
        return x_BTD + self.feed_dropout(self.feed(self.feed_norm(x_BTD)), row_keys_B)

    def _attend(self, x_BTD: Tensor, may_see_B11T: Tensor) -> Tensor:
        rows, length, dim = x_BTD.shape
        split = self.query_key_value(x_BTD).view(rows, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=may_see_B11T)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, dim))
