"""The gradients of a step, from the parameters or from the caller, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.caller import type_found
from aiograd.tensors.core import TensorCore
from aiograd.tensors.tensor import Tensor

Pair = tuple[Tensor, Any]
#: by parameter, or one for each parameter in order; None for one without
Gradients = Mapping[Tensor, Any] | Sequence[Any]


def by_parameter(call: str, gradients: Gradients, params: Sequence[Tensor]) -> Mapping[Tensor, Any]:
    """Gradients in either form as a mapping; `call` is for messages.

    Raises:
        ArgumentTypeError: neither a mapping nor a sequence. ArgumentError: a sequence of another length than `params`.
    """
    if isinstance(gradients, Mapping):
        return gradients
    if not isinstance(gradients, Sequence) or isinstance(gradients, (str, TensorCore)):
        raise ArgumentTypeError(
            f"{call}: expected a mapping by parameter or a sequence with one gradient per parameter, found {type_found(gradients)}"
        )
    if len(gradients) != len(params):
        raise ArgumentError(f"{call}: got {len(gradients)} gradients for {len(params)} parameters; give one for each, in order, or None")
    return dict(zip(params, gradients, strict=True))


def with_gradients(params: list[Tensor], gradients: Mapping[Tensor, Any] | None) -> list[Pair]:
    """Parameters that have a gradient, with its array."""
    pairs: list[Pair] = []
    for p in params:
        if gradients is not None:
            grad: Any = gradients.get(p)
            if grad is not None:
                _check_gradient(p, grad)
        else:
            node: Any = p._node
            grad = p.grad if node is None or node.is_hidden else node.grad
        if grad is not None:
            pairs.append((p, grad._data if isinstance(grad, TensorCore) else grad))
    return pairs


def _check_gradient(p: Tensor, grad: Any) -> None:
    if not hasattr(grad, "shape"):
        found = type(grad).__name__
        raise ArgumentTypeError(f"step(gradients): the gradient of a parameter of shape {list(p.shape)} is a {found}; expected a Tensor")
    if tuple(grad.shape) != p.shape:
        raise ArgumentError(f"step(gradients): a gradient of shape {list(grad.shape)} for a parameter of shape {list(p.shape)}")
    kind = np.dtype(grad.dtype).kind
    if kind not in "fiub" and (kind, p.dtype.kind) != ("c", "c"):
        raise ArgumentTypeError(f"step(gradients): a gradient of {grad.dtype} for a parameter of {p.dtype}; expected {p.dtype}")
