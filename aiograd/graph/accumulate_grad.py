"""AccumulateGrad: the node at which a leaf's gradient arrives, and the leaf's autograd state.

Note [The leaf's state lives in its node]
    A leaf that requires grad owns its AccumulateGrad, which holds the gradient and the hooks and knows the leaf only weakly. So the
    two form no cycle, the node is the same for every graph, and a gradient edge to it stays valid. If the leaf is gone while a graph
    that used it lives on, gradients still arrive (hooks on it run, captures see them) and nobody can ask for them any more.

Note [Accumulation is staged]
    `Staged` makes the sum with the existing gradient out of place and never writes to an array that others may see. `commit`, called for
    all leaves of a pass in one synchronous step, swaps references. If another pass has committed in between, or the user has modified the
    existing gradient, the sum is made again on top of that, so nothing is lost (a lock covers loops in several threads).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.hooks import Hook, HookDict, RemovableHandle
from aiograd.graph.node import LEAF_SEQUENCE, InputMetadata, Node, NodeExtra
from aiograd.types import Array, Shape

_commit_lock = threading.Lock()


def _renew_lock() -> None:
    """A thread that held the lock does not exist in a forked child."""
    global _commit_lock
    _commit_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class AccumulateGrad(Node):
    """Adds what arrives to the gradient of a leaf.

    Args:
        shape, dtype, device: of the leaf.
        leaf: the leaf (held weakly), or None.
    """

    __slots__ = ("shape", "dtype", "device", "grad", "leaf", "post_accumulate_hooks", "eager_hooks")

    is_leaf = True
    is_single = True
    num_inputs = 1

    def __init__(self, shape: Shape, dtype: np.dtype[Any], device: str, leaf: Any) -> None:
        self.next_nodes = ()
        self.next_nrs = ()
        self._seq = LEAF_SEQUENCE
        self._extra: NodeExtra | None = None
        self.shape = shape
        self.dtype = dtype
        self.device = device
        #: the gradient: None, an array nobody has asked for yet, or a Tensor
        self.grad: Any = None
        self.leaf = weakref.ref(leaf)
        self.post_accumulate_hooks: HookDict | None = None
        #: how many of the hooks asked for accumulation at once instead of at the commit
        self.eager_hooks: set[int] | None = None

    @property
    def name(self) -> str:
        """``AccumulateGrad``."""
        return "AccumulateGrad"

    def apply(self, grads: Any) -> tuple[()]:
        """Add the gradient at once, outside of any pass's transaction (the engine stages instead)."""
        (grad,) = grads
        if grad is not None:
            staged = Staged(self, grad)
            commit([staged])
        return ()

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        """Shape, dtype and device of the leaf."""
        return (InputMetadata(self.shape, self.dtype, self.device),)

    def metadata_of(self, input_nr: int) -> InputMetadata:
        """Shape, dtype and device of the leaf."""
        return InputMetadata(self.shape, self.dtype, self.device)

    def register_post_accumulate(self, hook: Hook, eager: bool) -> RemovableHandle:
        """Call ``hook(leaf)`` once the gradient has been accumulated: after the commit, or at once where `eager`."""
        if self.post_accumulate_hooks is None:
            self.post_accumulate_hooks = HookDict()
        handle = self.post_accumulate_hooks.add(hook)
        if eager:
            self.eager_hooks = (self.eager_hooks or set()) | {handle._key}
        return handle

    def seen_grad(self) -> Any:
        """The gradient as a Tensor or None, to be handed to the user: from now on the same Tensor every time."""
        grad = self.grad
        if grad is None or BOUNDARY.is_tensor(grad):
            return grad
        with _commit_lock:  # a loop in another thread may be committing
            grad = self.grad
            if grad is not None and not BOUNDARY.is_tensor(grad):
                grad = self.grad = BOUNDARY.wrap(grad)
            return grad

    @property
    def is_eager(self) -> bool:
        """Whether a hook that is still registered asked for accumulation at once."""
        return bool(self.eager_hooks and self.post_accumulate_hooks and self.eager_hooks & self.post_accumulate_hooks.keys())


class Slot(Protocol):
    """Where a gradient accumulates."""

    #: None, an array or a Tensor
    grad: Any


class Staged:
    """A gradient on its way to where it accumulates: the sum made so far, and what it was made from.

    Args:
        slot: whose attribute ``grad`` it goes to: the leaf, or what a distributed context keeps for the leaf.
        grad: what arrived.
    """

    __slots__ = ("slot", "grad", "base", "version", "total")

    def __init__(self, slot: Slot, grad: Array) -> None:
        self.slot = slot
        #: what arrived
        self.grad = grad
        self.add_up()

    def add_up(self) -> None:
        """Make `total` of what there is now (`base`, at `version`) and what arrived. Touches nothing that others see."""
        self.base = base = self.slot.grad
        self.version = _version_of(base)
        self.total = self.grad if base is None else _add(base, self.grad)

    @property
    def is_stale(self) -> bool:
        """Whether there is another gradient by now."""
        base = self.slot.grad
        return base is not self.base or (base is not None and _version_of(base) != self.version)


def commit(staged: Iterable[Staged]) -> None:
    """Swap every gradient for the staged sum, in one step: all of them or, where a sum fails, none."""
    with _commit_lock:
        for entry in staged:
            if entry.is_stale:
                entry.add_up()
        for entry in staged:
            entry.slot.grad = entry.total


def _version_of(grad: Any) -> int:
    return getattr(grad, "version", 0)


def _add(base: Any, grad: Array) -> Array:
    """The sum of the gradient a leaf has (None, an array or a Tensor) and one that arrived (an array, or a Tensor)."""
    if base is None:
        return grad
    if base.__class__ is not np.ndarray and BOUNDARY.is_tensor(base) and not BOUNDARY.is_tensor(grad):
        base = BOUNDARY.unwrap(base)
    return base + grad


def own(grad: Array) -> Array:
    """`grad` itself where the caller holds the only reference to an array of its own, else a copy.

    Call it as ``x = own(holder.pop())`` or with a single local name: the number of references is part of the test. A Tensor (the pass
    records a graph) is immutable to the engine and passes through.
    """
    if grad.__class__ is not np.ndarray:
        if isinstance(grad, np.generic):
            return np.asarray(grad)
        if BOUNDARY.is_tensor(grad):
            return grad
    if sys.getrefcount(grad) <= SOLE_OWNER and grad.base is None:
        return grad
    return np.array(grad, order="C") if grad.__class__ is np.ndarray else np.copy(grad)


def _calibrate() -> int:
    """References to an array that only a caller's local name and `own` hold."""

    def probe(grad: Any) -> int:
        return sys.getrefcount(grad)

    local = np.zeros(1)
    return probe(local)


SOLE_OWNER = _calibrate()
