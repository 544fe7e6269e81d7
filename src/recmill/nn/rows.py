"""Rows of different lengths packed one after the other, so that nothing is computed for padding.

B rows, N tokens of all rows, M queries, T positions of the longest row.
"""

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from recmill.kernels.encoder import KernelRows

Tokens = Literal["all", "queries"]


class Rows:
    """The row and position of each token, and which tokens are queries.

    Queries are the tokens whose outputs are needed, in ascending order. `keys_B` seeds the dropout. Nothing here reads
    a value from `lengths_B`, because on a GPU the host would wait for it.
    """

    def __init__(self, lengths_B: Tensor, longest: int, queries_M: Tensor, keys_B: Tensor, num_tokens: int) -> None:
        self.lengths_B = lengths_B
        self.longest = longest
        self.queries_M = queries_M
        self.keys_B = keys_B
        self.num_tokens = num_tokens

    @cached_property
    def row_N(self) -> Tensor:
        numbers = torch.arange(len(self.lengths_B), device=self.lengths_B.device)
        return numbers.repeat_interleave(self.lengths_B, output_size=self.num_tokens)

    @cached_property
    def from_end_N(self) -> Tensor:
        """Position of each token counted from the end of its row: 0 for the last one."""
        tokens = torch.arange(self.num_tokens, device=self.lengths_B.device)
        return self.lengths_B.cumsum(0)[self.row_N] - 1 - tokens

    @cached_property
    def folded_keys_B(self) -> Tensor:
        """The keys as int32."""
        return (self.keys_B ^ (self.keys_B >> 32)).to(torch.int32)

    @cached_property
    def bounds(self) -> Tensor:
        """Index of each row's first token, and the number of tokens: int32 [B + 1]."""
        return F.pad(self.lengths_B.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def ends_M(self) -> Tensor:
        """Index after the last token of each query's row."""
        return self.lengths_B.cumsum(0)[self.row_N[self.queries_M]]

    @cached_property
    def begins_M(self) -> Tensor:
        """Index of the first token of each query's row."""
        return self.ends_M - self.lengths_B[self.row_N[self.queries_M]]

    def padded_to(self, length: int) -> Tensor:
        """Return the index of each token in a flattened [B, length], padded on the left."""
        return (self.row_N + 1) * length - 1 - self.from_end_N

    @cached_property
    def is_real_BT(self) -> Tensor:
        from_end = torch.arange(self.longest - 1, -1, -1, device=self.lengths_B.device)
        return from_end < self.lengths_B[:, None]

    def for_kernels(self, outputs: Tokens = "all") -> KernelRows:
        return KernelRows(self.lengths_B, self.keys_B, self.longest, self.queries_M if outputs == "queries" else None)
