"""Dropout."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional
from aiograd.nn.function_module import FunctionModule
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor


class Dropout(FunctionModule, function=functional.dropout):
    """`dropout` as a module.

    Raises:
        ArgumentError: `p` is no probability.

    >>> ag.nn.Dropout(0.5).eval()(ag.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    p: float = 0.5
    inplace: bool = False
    generator: Generator | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise ArgumentError(f"{type(self).__name__}(p={self.p}): expected a probability between 0 and 1")

    def forward(self, input: Any) -> Tensor:
        return self._call(input, training=self.training)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout1d(Dropout, function=functional.dropout1d):
    """`dropout1d` as a module.

    >>> ag.nn.Dropout1d(1.0)(ag.ones(1, 2, 3))
    tensor([[[0., 0., 0.],
             [0., 0., 0.]]])
    """


class Dropout2d(Dropout, function=functional.dropout2d):
    """`dropout2d` as a module.

    >>> ag.nn.Dropout2d(0.5)(ag.ones(1, 2, 3, 4)).shape
    (1, 2, 3, 4)
    """


class Dropout3d(Dropout, function=functional.dropout3d):
    """`dropout3d` as a module.

    >>> ag.nn.Dropout3d(0.5)(ag.ones(1, 2, 3, 4, 5)).shape
    (1, 2, 3, 4, 5)
    """
