"""Dropout."""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional
from aiograd.nn.module import Module, refuse_inplace
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor


class Dropout(Module):
    """Set each element to 0 with probability `p` in training, and scale the others so that the mean stays.

    Args:
        p: in [0, 1].
        generator: the generator to draw from; None: the default generator of the running task.
        inplace: False; True is refused, since gradients need the values.

    Raises:
        ArgumentError: `p` is no probability.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, generator: Generator | None = None) -> None:
        refuse_inplace(type(self).__name__, inplace)
        if not 0 <= p <= 1:
            raise ArgumentError(f"{type(self).__name__}(p={p}): expected a probability between 0 and 1")
        self.p = p
        self.generator = generator

    def forward(self, input: Any) -> Tensor:
        """Drop elements in training.

        Args:
            input: any shape.

        Returns:
            A Tensor of the same shape; `input` itself in evaluation.
        """
        return functional.dropout(input, self.p, self.training, generator=self.generator)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout1d(Dropout):
    """Set whole channels of lines to 0 with probability `p` in training, and scale the others.

    Args:
        p: in [0, 1].
        inplace: False; True is refused, since gradients need the values.
        generator: the generator to draw from; None: the default generator of the running task.
    """

    def forward(self, input: Any) -> Tensor:
        """Drop channels in training.

        Args:
            input: (N, C, L) or (C, L).

        Returns:
            A Tensor of the same shape; `input` itself in evaluation.
        """
        return functional.dropout1d(input, self.p, self.training, generator=self.generator)


class Dropout2d(Dropout):
    """Set whole channels of images to 0 with probability `p` in training, and scale the others.

    Args:
        p: in [0, 1].
        inplace: False; True is refused, since gradients need the values.
        generator: the generator to draw from; None: the default generator of the running task.
    """

    def forward(self, input: Any) -> Tensor:
        """Drop channels in training.

        Args:
            input: (N, C, H, W); three axes are (N, C, L), as in PyTorch.

        Returns:
            A Tensor of the same shape; `input` itself in evaluation.
        """
        return functional.dropout2d(input, self.p, self.training, generator=self.generator)


class Dropout3d(Dropout):
    """Set whole channels of volumes to 0 with probability `p` in training, and scale the others.

    Args:
        p: in [0, 1].
        inplace: False; True is refused, since gradients need the values.
        generator: the generator to draw from; None: the default generator of the running task.
    """

    def forward(self, input: Any) -> Tensor:
        """Drop channels in training.

        Args:
            input: (N, C, D, H, W) or (C, D, H, W).

        Returns:
            A Tensor of the same shape; `input` itself in evaluation.
        """
        return functional.dropout3d(input, self.p, self.training, generator=self.generator)
