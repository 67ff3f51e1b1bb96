"""InputBuffer: the sum of the gradients that arrive at a node, in an order that does not depend on when they arrive.

Note [Deterministic sums]
    Contributions are added in descending default sequence number of their producer, then by its output index: the order in which an
    undisturbed pass produces them. A contribution that is next in that order is added at once, so no more memory is needed than for a running sum;
    one that comes early is kept until its turn. Priorities set by hand have no influence.

Note [Nothing visible is written to]
    The first contribution may share memory with other arrays (a view, an array given to two edges). The first addition makes a new array; only
    that one is then added to in place.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy import ndarray

from aiograd.ops.slice_gradient import SliceGradient, UnsummedGradient
from aiograd.running.types import Array

#: (-sequence number of the producer, its output index)
Key: TypeAlias = tuple[int, int]

#: additions of arrays larger than this many bytes run on the executor
FOLD_INLINE_BYTES = 1 << 20


def added(have: Any, grad: Any, is_owned: bool) -> Any:
    """The sum of a gradient and the earlier ones; an array of its own, see Note [Nothing visible is written to].

    Args:
        have: the sum so far, None if `grad` is the first.
        grad: the gradient; one that comes first is a `SliceGradient`.
        is_owned: True if `have` is such a sum, so that it may be added to in place.

    Returns:
        The sum: an array of the shape and dtype of the gradients, or a Tensor in a pass that records a graph.
    """
    cls = grad.__class__
    if cls is SliceGradient:
        if is_owned and have.__class__ is ndarray:
            grad.add_to(have)
            return have
        grad = grad.dense()
        return grad if have is None else have + grad
    if is_owned and have.__class__ is ndarray and cls is ndarray:
        have += grad
        return have
    return have + grad


class InputBuffer:
    """Collects the contributions to every input of one node.

    Args:
        num_inputs: the number of inputs of the node.
        expected: sorted keys of all contributions to come; every producer reports exactly once per edge, with None for no gradient.
    """

    __slots__ = ("sums", "owned", "expected", "position", "parked", "unfolded", "folding")

    def __init__(self, num_inputs: int, expected: list[Key]) -> None:
        self.sums: list[Array | None] = [None] * num_inputs
        self.owned: list[bool] = [False] * num_inputs
        self.expected: list[Key] = expected
        self.position: int = 0
        self.parked: dict[Key, tuple[int, Array | None]] = {}
        #: large contributions in order, to be added by `fold` off the loop
        self.unfolded: list[tuple[int, Array]] = []
        self.folding: bool = False

    def add(self, key: Key, input_nr: int, grad: Array | None) -> bool:
        """Take a contribution; returns True if `fold` has something to do and is not running yet."""
        expected = self.expected
        if key != expected[self.position]:
            self.parked[key] = (input_nr, grad)
            return False
        self._take(input_nr, grad)
        self.position += 1
        parked = self.parked
        while parked and self.position < len(expected):
            entry = parked.pop(expected[self.position], None)
            if entry is None:
                break
            self._take(*entry)
            self.position += 1
        return bool(self.unfolded) and not self.folding

    def _take(self, input_nr: int, grad: Array | None) -> None:
        if grad is None:
            return
        is_array = isinstance(grad, (ndarray, SliceGradient, UnsummedGradient))
        large = self.sums[input_nr] is not None and is_array and grad.nbytes > FOLD_INLINE_BYTES
        if large or self.folding or self.unfolded:
            self.unfolded.append((input_nr, grad))
        else:
            self._sum(input_nr, grad)

    def _sum(self, input_nr: int, grad: Array) -> None:
        have = self.sums[input_nr]
        if grad.__class__ is UnsummedGradient:
            for part in grad.parts:
                self._sum(input_nr, part)
        elif have is None and grad.__class__ is not SliceGradient:
            self.sums[input_nr] = grad
        else:
            self.sums[input_nr] = added(have, grad, self.owned[input_nr])
            self.owned[input_nr] = True

    def fold(self) -> None:
        """Add the large contributions in `unfolded`; runs off the loop, one call at a time."""
        while self.unfolded:
            batch = self.unfolded[:]
            for input_nr, grad in batch:
                self._sum(input_nr, grad)
            del self.unfolded[: len(batch)]

    def take(self) -> list[Any]:
        """The sums, once everything expected has arrived."""
        return self.sums
