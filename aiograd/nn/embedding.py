"""Embedding: vectors by number."""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional, init
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.running.random import Generator
from aiograd.tensors import inplace
from aiograd.tensors.tensor import Tensor


class Embedding(Module):
    """A table of vectors, looked up by integers.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: length of the vectors.
        padding_idx: a row that is zero at first and takes no gradient.
        dtype, device: of the table.
        generator: draws its first values, standard normal.

    Raises:
        ArgumentError: `padding_idx` is the number of no row.

    Shape: integers (...) to (..., embedding_dim).

    >>> table = ag.nn.Embedding(10, 3, padding_idx=0)
    >>> table(ag.tensor([[1, 2], [0, 4]])).shape
    (2, 2, 3)
    >>> table(ag.tensor(0)).detach()
    tensor([0., 0., 0.])
    """

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: Any = None,
        device: str | None = None,
        generator: Generator | None = None,
    ) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(f"Embedding(padding_idx={padding_idx}): expected the number of one of {num_embeddings} rows")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx: int | None = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.weight = new_parameter((num_embeddings, embedding_dim), dtype, device)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values.

        Args:
            generator: where the numbers come from; None: the default generator.
        """
        init.normal_(self.weight, generator=generator)
        if self.padding_idx is not None:
            keep = functional.one_hot([self.padding_idx], self.num_embeddings).reshape(-1, 1) == 0
            inplace.write(self.weight, (self.weight.detach() * keep.to(self.weight.device))._data)

    def forward(self, input: Any) -> Tensor:
        return functional.embedding(input, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
