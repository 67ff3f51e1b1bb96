"""Versions of values that backward needs, and the error for one that has been modified in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.errors import ModifiedError
from aiograd.tensors.core import TensorCore, base_of

_ADVICE = "Clone it before modifying, or use an out-of-place operation."

#: the advice if the value is a leaf; grad mode was off then, for else the modification would have raised
_ADVICE_LEAF = (
    "It is a leaf that requires grad, or a view of one, and those are modified under no_grad() only: most likely by an optimizer's step, perhaps of "
    "another task, between this forward and its backward. Let the tasks that share parameters take turns, each with a common asyncio.Lock held from "
    "forward to step; or let all of them compute `grads = await ag.grad(loss, parameters)` first and call `optimizer.step(grads)` after that."
)


def versions_of(values: Sequence[Any]) -> Any:
    """Versions of the Tensors about to be saved: 0 if all are unmodified, else the tuple of versions."""
    versions = []
    for value in values:
        if value is None:
            versions.append(0)
        elif isinstance(value, tuple):
            versions.append(sum(t._vc[0] for t in value if t._vc is not None))
        else:
            versions.append(0 if value._vc is None else value._vc[0])
    return tuple(versions) if any(versions) else 0


def belongs_to_leaf(value: Any) -> bool:
    """True if a value is a leaf that requires grad, or a view of one."""
    return isinstance(value, TensorCore) and (node := base_of(value)._node) is not None and node.is_leaf


def modified_error(what: str, shape: Sequence[int], found: int, expected: int, is_leaf: bool) -> ModifiedError:
    """The error for a saved value that has been modified.

    Args:
        what: text that names the value and the node that saved it.
        shape: shape of the value.
        found, expected: its version, and the one that was saved.
        is_leaf: see `belongs_to_leaf`.
    """
    return ModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, with shape {list(shape)}, "
        f"is at version {found}; expected version {expected} instead. {_ADVICE_LEAF if is_leaf else _ADVICE}"
    )
