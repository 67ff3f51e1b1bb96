"""Shape, dtype and device of a gradient that arrives at a node."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aiograd.running.types import Shape


class InputMetadata(NamedTuple):
    """Shape, dtype and device of the gradient of one input of a node.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> (x * 2).grad_fn.input_metadata
    (InputMetadata(shape=(2,), dtype=dtype('float32'), device='cpu'),)
    """

    shape: Shape
    dtype: np.dtype[Any]
    device: str = "cpu"
