"""Transformer encoder over packed rows. N tokens, M queries, D dims, B rows, T places of the longest row."""

import ctypes

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recmill.kernels.encoder import NativeBlock
from recmill.kernels.functions import fits
from recmill.nn.dropout import RowDropout
from recmill.nn.norms import WindowNorm, normed
from recmill.nn.rows import Rows


class EncoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input. Attention weights themselves are not dropped.

    `is_causal`: a token sees itself and what was before, else all of its row.
    """

    native: ctypes.CDLL | None = None

    def __init__(
        self, dim: int, num_heads: int, dropout: float, site: int, is_causal: bool, norms: tuple[nn.Module, nn.Module]
    ) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.attention_norm, self.feed_norm = norms
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.attention_dropout, self.feed_dropout = RowDropout(dropout, site), RowDropout(dropout, site + 1)

    def forward(self, x_ND: Tensor, rows: Rows, *, is_last: bool = False) -> Tensor:
        """[N, D]; of the last block only what is asked for, [M, D]."""
        is_subset = is_last and not rows.asks_all
        if isinstance(self.feed_norm, WindowNorm):  # needs whole rows
            out_ND = self._block(x_ND, rows, is_subset=False)
            return out_ND[rows.queries_M] if is_subset else out_ND
        return self._block(x_ND, rows, is_subset)

    def _block(self, x_ND: Tensor, rows: Rows, is_subset: bool) -> Tensor:
        head, is_plain = x_ND.shape[1] // self.num_heads, isinstance(self.feed_norm, nn.LayerNorm)
        if self.native is not None and fits(self.native, x_ND) and head % 16 == 0 and is_plain:
            probability = self.attention_dropout.probability if self.training else 0.0
            shape = (self.num_heads, self.is_causal, self.attention_dropout.site, probability)
            layers = (self.attention_norm, self.query_key_value, self.out, self.feed_norm, self.feed[0], self.feed[2])
            weights = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
            out: Tensor = NativeBlock.apply(x_ND, rows.native(self.native, of_queries=is_subset), shape, *weights)
            return out
        mixed_ND = self._attend(normed(self.attention_norm, x_ND, rows), rows)
        if is_subset:
            x_ND, mixed_ND = x_ND[rows.queries_M], mixed_ND[rows.queries_M]
        x_ND = x_ND + self.attention_dropout(self.out(mixed_ND), rows, of_queries=is_subset)
        return x_ND + self.feed_dropout(self.feed(normed(self.feed_norm, x_ND, rows)), rows, of_queries=is_subset)

    def _attend(self, x_ND: Tensor, rows: Rows) -> Tensor:
        dim = x_ND.shape[1]
        values = self.query_key_value(x_ND)
        padded = values.new_zeros(rows.is_real_BT.numel(), 3 * dim).index_copy(0, rows.padded_N, values)
        split = padded.view(-1, rows.longest, 3, self.num_heads, dim // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self._may_see(rows))
        return mixed.transpose(1, 2).reshape(-1, dim)[rows.padded_N]

    def _may_see(self, rows: Rows) -> Tensor:
        """[B, 1, T or 1, T]. Where nothing is real before a place, it sees itself: it must see something."""
        real_BT, length = rows.is_real_BT, rows.longest
        if not self.is_causal:
            return real_BT[:, None, None, :]
        before_TT = torch.ones(length, length, dtype=torch.bool, device=real_BT.device).tril()
        itself_TT = torch.eye(length, dtype=torch.bool, device=real_BT.device)
        return ((real_BT[:, None, :] & before_TT) | itself_TT)[:, None]
