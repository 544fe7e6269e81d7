"""Rows of different lengths packed one after the other: nothing is computed for padding.

B rows, N tokens of all rows, M queries, T places of the longest row.
"""

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from recmill.kernels.encoder import NativeRows


class Rows:
    """Where each token belongs, and which tokens are asked for; queries are in order."""

    def __init__(self, lengths_B: Tensor, queries_M: Tensor, keys_B: Tensor, num_tokens: int) -> None:
        self.lengths_B, self.queries_M, self.keys_B, self.num_tokens = lengths_B, queries_M, keys_B, num_tokens
        self.asks_all = len(queries_M) == num_tokens
        self.longest = int(lengths_B.max())

    @cached_property
    def row_N(self) -> Tensor:
        numbers = torch.arange(len(self.lengths_B), device=self.lengths_B.device)
        return numbers.repeat_interleave(self.lengths_B, output_size=self.num_tokens)

    @cached_property
    def from_end_N(self) -> Tensor:
        """0 for the last token of a row."""
        tokens = torch.arange(self.num_tokens, device=self.lengths_B.device)
        return self.lengths_B.cumsum(0)[self.row_N] - 1 - tokens

    def native(self, kernels: ctypes.CDLL, *, of_queries: bool = False) -> NativeRows:
        queries = self.queries_M if of_queries and not self.asks_all else None
        return NativeRows(kernels, self.lengths_B, self.keys_B, self.longest, queries)

    @cached_property
    def padded_N(self) -> Tensor:
        """Each token's place in [B, T]."""
        return self.padded_to(self.longest)

    def padded_to(self, length: int) -> Tensor:
        """Each token's place in [B, length], rows padded on the left."""
        return (self.row_N + 1) * length - 1 - self.from_end_N

    @cached_property
    def is_real_BT(self) -> Tensor:
        from_end = torch.arange(self.longest - 1, -1, -1, device=self.lengths_B.device)
        return from_end < self.lengths_B[:, None]
