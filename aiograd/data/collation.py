"""collate: examples that are alike become one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions.manipulation import stack
from aiograd.errors import ArgumentTypeError, ShapeError
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import tensor


def collate(examples: Sequence[Any]) -> Any:
    """A batch of examples: Tensors and arrays are stacked, numbers become a Tensor, tuples, lists and dicts are collated by entry.

    Args:
        examples: at least one, all alike. Texts and other objects stay in a list.

    Returns:
        A Tensor with an axis more in front, or a tuple, list or dict of them.

    Raises:
        ArgumentTypeError: no examples. ShapeError: examples of different lengths or shapes.

    >>> ag.data.collate([(1.0, "a"), (2.0, "b")])
    (tensor([1., 2.]), ['a', 'b'])
    """
    if not examples:
        raise ArgumentTypeError("collate: there are no examples")
    first = examples[0]
    if isinstance(first, (TensorCore, np.ndarray)):
        shapes = {tuple(example.shape) for example in examples}
        if len(shapes) > 1:
            raise ShapeError(f"collate: examples have shapes {sorted(map(list, shapes))}; expected one, or pass a collate function that pads")
        if isinstance(first, np.ndarray):
            return tensor(np.stack(examples))
        return stack(list(examples))
    if isinstance(first, (bool, int, float, complex, np.generic)):
        return tensor(np.array(examples) if isinstance(first, np.generic) else list(examples))
    if isinstance(first, Mapping):
        if any(example.keys() != first.keys() for example in examples):
            raise ShapeError(f"collate: examples have different keys; the first has {sorted(map(str, first))}")
        return {key: collate([example[key] for example in examples]) for key in first}
    if isinstance(first, (tuple, list)):
        if len({len(example) for example in examples}) > 1:
            raise ShapeError("collate: examples have different lengths; expected one, or pass a collate function that pads")
        parts = [collate(part) for part in zip(*examples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return list(examples)


def without_rows(example: Any) -> Any:
    """A batch of no examples, each of which would be like this one.

    Args:
        example: as `collate` takes it.

    Returns:
        As `collate` returns it, with Tensors of no rows and empty lists.
    """
    if isinstance(example, Mapping):
        return {key: without_rows(value) for key, value in example.items()}
    if isinstance(example, (tuple, list)):
        parts = [without_rows(part) for part in example]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    return collate([example])[:0]
