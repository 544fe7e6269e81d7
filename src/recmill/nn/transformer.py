"""Blocks of a transformer over packed rows.

N tokens, M queries, D dims, B rows, T positions of the longest row.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recmill.kernels.encoder import BlockShape, EncoderBlockFunction
from recmill.kernels.layers import UsesKernels
from recmill.nn.dropout import RowDropout
from recmill.nn.norms import Norm, WindowNorm, apply_norm, make_norm
from recmill.nn.rows import Rows, Tokens

Attention = Literal["causal", "bidirectional"]
Block = Literal["plain", "ligr"]


def attention_layout(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int
) -> Literal["packed", "padded"]:
    """Return how rows go into attention; `capability` is the GPU's, None: on CPU.

    Flash attention takes rows as they are packed, where its kernels can: on Ampere GPUs or newer, in half precision,
    with heads of up to 256 dims, a multiple of 8. Otherwise rows are padded to the longest one, behind a mask.
    """
    is_supported = capability is not None and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256
    return "packed" if is_supported and dtype in (torch.float16, torch.bfloat16) else "padded"


@dataclass(frozen=True)
class TransformerShape:
    """`causal`: a token attends to itself and earlier ones; `bidirectional`: to its complete row.

    `plain` blocks have GELU, `ligr` blocks gates and SwiGLU without biases (Borisyuk et al., 2025, as in eSASRec).
    """

    max_length: int
    num_layers: int
    num_heads: int
    dropout: float
    attention: Attention = "bidirectional"
    norm: Norm = "place"
    block: Block = "plain"


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class EncoderBlock(UsesKernels, nn.Module):
    """Pre-norm attention and feed-forward; the output of each is dropped out and added to its input.

    In a LiGR block, each output is first multiplied by sigmoid(W input + b), a gate for every element. `site`
    numbers the dropout after attention; that of the feed-forward layers is `site + 1`.
    """

    def __init__(self, dim: int, shape: TransformerShape, site: int) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.is_causal = shape.attention == "causal"
        self.attention_norm = make_norm(shape.norm, shape.max_length, dim)
        self.feed_norm = make_norm(shape.norm, shape.max_length, dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        is_plain = shape.block == "plain"
        plain_feed = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.feed = nn.Sequential(*plain_feed) if is_plain else SwiGlu(dim, 4 * dim)
        self.attention_gate = None if is_plain else nn.Linear(dim, dim)
        self.feed_gate = None if is_plain else nn.Linear(dim, dim)
        self.attention_dropout = RowDropout(shape.dropout, site)
        self.feed_dropout = RowDropout(shape.dropout, site + 1)

    def forward(self, x_ND: Tensor, rows: Rows, outputs: Tokens = "all") -> Tensor:
        """Return [N, D], or only the outputs of the queries, [M, D]."""
        if len(rows.queries_M) == rows.num_tokens:
            outputs = "all"
        if isinstance(self.feed_norm, WindowNorm):  # it needs complete rows
            out_ND = self._forward_in_torch(x_ND, rows, "all")
            return out_ND if outputs == "all" else out_ND[rows.queries_M]
        library = self.library_for(x_ND)
        dim = x_ND.shape[1]
        if library is None or dim // self.num_heads % 16 or not isinstance(self.feed, nn.Sequential):
            return self._forward_in_torch(x_ND, rows, outputs)
        dropout = self.attention_dropout.probability if self.training else 0.0
        shape = BlockShape(dim, 4 * dim, self.num_heads, self.is_causal, self.attention_dropout.site, dropout)
        layers = (self.attention_norm, self.query_key_value, self.out, self.feed_norm, self.feed[0], self.feed[2])
        weights = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
        return EncoderBlockFunction.apply(library, x_ND, rows.for_kernels(outputs), shape, *weights)

    def _forward_in_torch(self, x_ND: Tensor, rows: Rows, outputs: Tokens) -> Tensor:
        attended_ND = self._attend(apply_norm(self.attention_norm, x_ND, rows), rows)
        if outputs == "queries":
            x_ND, attended_ND = x_ND[rows.queries_M], attended_ND[rows.queries_M]
        change_ND = self.attention_dropout(self.out(attended_ND), rows, outputs)
        x_ND = x_ND + _gated(self.attention_gate, x_ND, change_ND)
        change_ND = self.feed_dropout(self.feed(apply_norm(self.feed_norm, x_ND, rows)), rows, outputs)
        return x_ND + _gated(self.feed_gate, x_ND, change_ND)

    def _attend(self, x_ND: Tensor, rows: Rows) -> Tensor:
        values = self.query_key_value(x_ND)
        capability = torch.cuda.get_device_capability(values.device) if values.is_cuda else None
        layout = attention_layout(capability, values.dtype, x_ND.shape[1] // self.num_heads)
        return self._attend_packed(values, rows) if layout == "packed" else self._attend_padded(values, rows)

    def _attend_packed(self, values: Tensor, rows: Rows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # loads torch's compiler: slow

        query, key, value = values.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        window = (-1, 0 if self.is_causal else -1)  # how many tokens before and after it each attends to; -1: all
        bounds = rows.bounds
        attended = varlen_attn(query, key, value, bounds, bounds, rows.longest, rows.longest, window_size=window)
        assert isinstance(attended, Tensor)
        return attended.flatten(1)

    def _attend_padded(self, values: Tensor, rows: Rows) -> Tensor:
        dim = values.shape[1] // 3
        index_N = rows.padded_to(rows.longest)
        padded = values.new_zeros(rows.is_real_BT.numel(), 3 * dim).index_copy(0, index_N, values)
        split = padded.view(-1, rows.longest, 3, self.num_heads, dim // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask(rows))
        return attended.transpose(1, 2).reshape(-1, dim)[index_N]

    def _mask(self, rows: Rows) -> Tensor:
        """Return the attention mask, [B, 1, T or 1, T]. Padding attends to itself, to avoid NaN."""
        if not self.is_causal:
            return rows.is_real_BT[:, None, None, :]
        itself_TT = torch.eye(rows.longest, dtype=torch.bool, device=rows.lengths_B.device)
        earlier_TT = torch.ones_like(itself_TT).tril()
        return ((rows.is_real_BT[:, None, :] & earlier_TT) | itself_TT)[:, None]


def _gated(gate: nn.Linear | None, x_ND: Tensor, change_ND: Tensor) -> Tensor:
    return change_ND if gate is None else torch.sigmoid(gate(x_ND)) * change_ND
