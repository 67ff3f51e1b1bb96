"""AccumulateGrad: the node at which a leaf's gradient arrives, and the leaf's autograd state.

Note [The leaf's state lives in its node]
    A leaf that requires grad owns its AccumulateGrad, which holds the gradient and the hooks and knows the leaf only weakly. So the
    two form no cycle, the node is the same for every graph, and a gradient edge to it stays valid. If the leaf is deleted while a graph
    that used it exists, gradients still arrive (its hooks run, captures see them), but there is no tensor to read them from.

Note [Accumulation is staged]
    `Staged` computes the sum with the existing gradient out of place and never writes to an array that may be shared. `commit`, called for
    all leaves of a pass in one synchronous step, swaps references. If another pass has committed in between, or the user has modified the
    existing gradient, the sum is computed anew from that, so nothing is lost (a lock covers loops in several threads).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from sys import getrefcount
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from aiograd.graph.boundary import BOUNDARY
from aiograd.graph.hooks import Hook, HookDict, RemovableHandle
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import LEAF_SEQUENCE, Node, NodeExtra
from aiograd.running.types import Array, Shape

_commit_lock = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: the thread that held it may not exist there."""
    global _commit_lock
    _commit_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class AccumulateGrad(Node):
    """Adds the gradient that arrives to the gradient of a leaf.

    Args:
        shape, dtype, device: of the leaf.
        leaf: the leaf (held weakly), or None.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> node = (x * 2).grad_fn.next_edge(0).node
    >>> isinstance(node, ag.graph.AccumulateGrad), node.name
    (True, 'AccumulateGrad')
    """

    __slots__ = ("shape", "dtype", "device", "grad", "leaf", "post_accumulate_hooks", "eager_hooks")

    is_leaf = True
    is_single = True
    num_inputs = 1
    #: True if the gradient is for another library alone: it accumulates here, and neither ``.grad`` of the leaf nor optimizers see it
    is_hidden = False

    def __init__(self, shape: Shape, dtype: np.dtype[Any], device: str, leaf: Any) -> None:
        self.next_nodes: tuple[Node | None, ...] = ()
        self.next_nrs: tuple[int, ...] = ()
        self._seq = LEAF_SEQUENCE
        self._extra: NodeExtra | None = None
        self.shape: Shape = shape
        self.dtype: np.dtype[Any] = dtype
        self.device: str = device
        #: the gradient: None, an array while the user has not read it yet, or a Tensor
        self.grad: Any = None
        self.leaf: weakref.ref[Any] = weakref.ref(leaf)
        self.post_accumulate_hooks: HookDict | None = None
        #: keys of the hooks that asked for accumulation at once instead of at the commit
        self.eager_hooks: set[int] | None = None

    @property
    def name(self) -> str:
        return "AccumulateGrad"

    def apply(self, grads: Any) -> tuple[()]:
        """Add the gradient at once, outside of any pass's transaction (the engine stages instead).

        Args:
            grads: the gradient, or None, in a sequence of one.

        Returns:
            Nothing: a leaf has no further edges.
        """
        (grad,) = grads
        if grad is not None:
            staged = Staged(self, grad)
            commit([staged])
        return ()

    @property
    def input_metadata(self) -> tuple[InputMetadata, ...]:
        return (InputMetadata(self.shape, self.dtype, self.device),)

    def metadata_of(self, input_nr: int) -> InputMetadata:
        return InputMetadata(self.shape, self.dtype, self.device)

    def register_post_accumulate(self, hook: Hook, eager: bool) -> RemovableHandle:
        """Call ``hook(leaf)`` once the gradient has been accumulated: after the commit, or at once where `eager`.

        Args:
            hook: called with the leaf.
            eager: accumulate this leaf at once, outside of the transaction.

        Returns:
            A handle that removes the hook.
        """
        if self.post_accumulate_hooks is None:
            self.post_accumulate_hooks = HookDict()
        handle = self.post_accumulate_hooks.add(hook)
        if eager:
            self.eager_hooks = (self.eager_hooks or set()) | {handle._key}
        return handle

    def seen_grad(self) -> Any:
        """The gradient for the user, as a Tensor or None; from now on the same Tensor every time.

        Returns:
            A Tensor, or None.
        """
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
        """True if a hook that is still registered asked for accumulation at once."""
        return bool(self.eager_hooks and self.post_accumulate_hooks and self.eager_hooks & self.post_accumulate_hooks.keys())


class GradTarget(Protocol):
    """An object with a `grad` into which a gradient accumulates: a leaf's node, or a buffer in its place."""

    #: None, an array or a Tensor
    grad: Any


class Staged:
    """A gradient that is staged for the commit: the sum with the target's gradient, and the terms of that sum.

    Args:
        target: the object with the ``grad`` that is replaced: the leaf's node, or the entry of a distributed context for the leaf.
        grad: the gradient that arrived.
    """

    __slots__ = ("target", "grad", "base", "version", "total")

    def __init__(self, target: GradTarget, grad: Array) -> None:
        self.target: GradTarget = target
        #: the gradient that arrived
        self.grad: Array = grad
        if target.grad is None:  # nearly always, and models have many leaves
            self.base: Any = None
            self.version: int = 0
            self.total: Array = grad
        else:
            self.add_up()

    def add_up(self) -> None:
        """Compute `total` from the target's present gradient (`base`, at `version`) and the one that arrived. Changes no shared array."""
        self.base = base = self.target.grad
        self.version = _version_of(base)
        self.total = self.grad if base is None else _add(base, self.grad)

    @property
    def is_stale(self) -> bool:
        """True if the target's gradient has changed since `add_up`."""
        base = self.target.grad
        return base is not self.base or (base is not None and _version_of(base) != self.version)


def commit(staged: Iterable[Staged], firsts: Mapping[Any, Array] = MappingProxyType({})) -> None:
    """Replace every gradient by the staged sum, in one step: all of them or, if a sum raises, none.

    Args:
        staged: sums with gradients that were there.
        firsts: gradients of leaves that had none, which need no sum, nor an object to hold it, unless another pass has committed in between.
    """
    with _commit_lock:
        for leaf in firsts:
            if leaf.grad is not None:
                staged = [*staged, *[Staged(leaf, grad) for leaf, grad in firsts.items()]]
                firsts = {}
                break
        for entry in staged:
            if (entry.base is not None or entry.target.grad is not None) and entry.is_stale:
                entry.add_up()
        for leaf, grad in firsts.items():
            leaf.grad = grad
        for entry in staged:
            entry.target.grad = entry.total


def stage_all(leaves: Iterable[AccumulateGrad], sums: dict[Any, Any], firsts: dict[Any, Array], staged: dict[Any, Staged]) -> None:
    """Stage the gradients of leaves for `commit`.

    Args:
        leaves: the leaves.
        sums: their gradients, which nothing else may refer to; emptied of them.
        firsts: receives the gradients of leaves that have none.
        staged: receives the sums with gradients that are there.
    """
    for leaf in leaves:
        grad = sums.pop(leaf)
        # the first conditions of `own`, here because a call per leaf costs a small pass a tenth
        if grad.__class__ is not ndarray or grad.base is not None or getrefcount(grad) > SOLE_OWNER_OF_LOCAL:
            grad = own(grad)
        if leaf.grad is None:
            firsts[leaf] = grad
        else:
            staged[leaf] = Staged(leaf, grad)


def _version_of(grad: Any) -> int:
    return getattr(grad, "version", 0)


def _add(base: Any, grad: Array) -> Array:
    """The sum of the gradient a leaf has (None, an array or a Tensor) and one that arrived (an array, or a Tensor)."""
    if base is None:
        return grad
    if base.__class__ is not ndarray and BOUNDARY.is_tensor(base) and not BOUNDARY.is_tensor(grad):
        base = BOUNDARY.unwrap(base)
    return base + grad


def own(grad: Array) -> Array:
    """`grad` itself where the caller holds the only reference to an array of its own, else a copy.

    Call it as ``x = own(holder.pop())`` or with a single local name: the number of references is part of the test. A Tensor (the pass
    records a graph) is immutable to the engine and passes through. An array over the memory of another library's is its own if that says
    so (``__aiograd_gives__``).
    """
    if grad.__class__ is not ndarray:
        if isinstance(grad, np.generic):
            return np.asarray(grad)
        if BOUNDARY.is_tensor(grad):
            return grad
    if getrefcount(grad) <= SOLE_OWNER and (grad.base is None or _is_whole(grad) or getattr(grad.base, "__aiograd_gives__", False)):
        return grad
    return np.array(grad, order="C") if grad.__class__ is ndarray else np.copy(grad)


def _is_whole(view: Array) -> bool:
    """True if an array is all of the memory of another, in order, and nothing else refers to that one, as after a rule's last ``reshape``."""
    base = view.base
    return (
        base.__class__ is ndarray
        and base.base is None
        and base.size == view.size
        and base.dtype == view.dtype
        and view.flags.c_contiguous
        and view.flags.writeable
        and getrefcount(base) <= _SOLE_VIEW
    )


def _calibrate() -> tuple[int, int, int]:
    """References that are counted of an array that nothing else holds; which names count depends on the Python: 3.14 lends what locals hold."""

    def probe(grad: Any) -> int:
        return getrefcount(grad)

    def probe_base(view: Any) -> int:
        base = view.base
        return getrefcount(base)

    local = np.zeros(1)
    return probe(local), getrefcount(local), probe_base(np.zeros((1, 1)).reshape(1))


#: of an array that a caller's local name and `own` hold; where the local name itself is looked at; of the base of one view
SOLE_OWNER, SOLE_OWNER_OF_LOCAL, _SOLE_VIEW = _calibrate()
