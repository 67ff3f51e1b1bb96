"""WriteRecorder: how a recording treats Tensors that are modified in place.

Note [In place, in a program without places]
    A value of a program is made once. So a tensor that the function has computed and then modifies is from there on another value: the row out
    of place, recorded as any other; where the tensor is a view, its base becomes a ``setitem`` of that, and every other view of the base is taken
    anew when it is used next. That is the graph that the eager function records (Note [Modifying a view] in `aiograd.tensors.inplace`), so the
    bits are the same.

    A tensor that the function has made of numbers (`aiograd.zeros`) is copied first, since every call makes one anew.

    A tensor from elsewhere (a parameter that is updated by hand, a buffer, a gradient) is really written to, by a statement that is no row. After it
    every captured tensor counts as another value, since its memory may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aiograd.compiler.effects import statement_op
from aiograd.compiler.program import ValueKind
from aiograd.compiler.recorded_calls import CallRecorder
from aiograd.errors import ModifiedError
from aiograd.ops.op import ROWS
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import map_tree
from aiograd.tensors.core import TensorCore, base_of, counter_of, make
from aiograd.tensors.inplace import index_in_parent, selects_nothing, views_from
from aiograd.tensors.record import call


class WriteRecorder(CallRecorder):
    """A recorder that follows modifications in place. See the module's Note."""

    def modifies(
        self,
        tensor: TensorCore,
        name: str,
        again: Callable[[], Any],
        compute: Callable[[TensorCore], Any],
        write: Callable[..., None],
        operands: tuple[TensorCore, ...] = (),
        index: Any = None,
    ) -> Any:
        """Record the modification of a tensor.

        Args:
            tensor: the Tensor to modify; checked.
            name: the name of the modification.
            again: carries it out.
            compute: the same out of place, recorded.
            write: carries it out on the arrays of `tensor` and `operands`, with `index` if there is one.

        Returns:
            What `again` returns.
        """
        is_followed = self.broken is None and self._follow(tensor, name, compute, write, operands, index)
        counter = counter_of(tensor)
        before = counter[0]
        with ModeScope(trace=None):
            result = again()
        if self.broken is None:
            is_same = is_followed and counter[0] == before  # a mask has selected nothing: in another run it may
            counter[0] += is_same
            self._check_saved()
            counter[0] -= is_same and self.broken is not None
            for _, view in views_from(tensor) if is_same else ():
                view.version = counter[0]
        return result

    def renames(self, tensor: TensorCore, other: TensorCore) -> None:
        """Note that a tensor has the value of another one from here on."""
        value = self._find(other)
        if value is None:
            self.breaks("it modifies a tensor in place whose views cannot be followed")
            return
        for known in self._sharing.get(id(tensor._data), ()):
            self._values.pop(id(known), None)
        self._values[id(tensor)] = self._arrays[id(tensor._data)] = value
        self._alive += [tensor, tensor._data]

    # ---------------------------------------------------------------- steps

    def _follow(self, tensor: TensorCore, name: str, compute: Any, write: Callable[..., None], operands: tuple[TensorCore, ...], index: Any) -> bool:
        """Note a modification; True if the Tensor is another value from here on."""
        base = base_of(tensor)
        if not isinstance(base._data, np.ndarray):
            self.breaks(f"it modifies a tensor on {tensor.device} in place")
            return False
        known = self._find(base) or self._gradient(base)
        records = current_mode().grad and (base._node is not None or tensor._node is not None or any(o._node is not None for o in operands))
        if id(base) in self._created and (known is None or known.kind is ValueKind.CAPTURED):
            self.make_again(base)
            self._compute(tensor, compute)
            return True
        if known is None or known.kind is ValueKind.CAPTURED or id(base) in self._gradients:
            if known is None and id(base) not in self.reads.tensors:
                self.breaks("it modifies a tensor in place whose memory others may share")
            elif records:
                self.breaks("it modifies a captured tensor in place, in the graph")
            else:
                self._write(tensor, self._gradients.get(id(base)) or (lambda: base), name, write, operands, index)
        elif known.kind is ValueKind.INPUT:
            self.breaks("it modifies an argument in place")
        elif id(base) not in self._made_by_rows or self._shows_others(base):
            self.breaks("it modifies a tensor in place whose memory others may share")
        else:
            self._compute(tensor, compute)
            return True
        return False

    def _shows_others(self, base: TensorCore) -> bool:
        array: Any = base._data
        while (array := getattr(array, "base", None)) is not None:
            if id(array) in self._arrays:
                return True
        return any(other is not base and other._node is not None for other in self._sharing.get(id(base._data), ()))

    def _write(
        self, tensor: TensorCore, owner: Callable[[], Any], name: str, write: Callable[..., None], operands: tuple[TensorCore, ...], index: Any
    ) -> None:
        """Add a statement that writes to memory that the program has not made."""
        if index is None:

            def run(*arrays: Any) -> None:
                write(*arrays)
                counter_of(owner())[0] += 1
        else:
            counts = any([operand._node is not None for operand in operands])

            def run(*arrays: Any, index: Any = None) -> None:  # type: ignore[misc]
                write(*arrays, index)
                counter_of(owner())[0] += counts or not selects_nothing(index)

        statics: Mapping[str, Any] = {} if index is None else {"index": map_tree(self._static, index, np.ndarray)}
        self._add(statement_op(name, run), (tensor, *operands), (), dict(statics))
        self.forget_captured()

    def _compute(self, tensor: TensorCore, compute: Callable[[TensorCore], Any]) -> None:
        """Record the new value of `tensor`, and of the Tensors that it is a view of."""
        old = self._copied(tensor)
        new = compute(old)
        if not isinstance(new, TensorCore) or new.shape != tensor.shape:
            return  # refused when it is carried out
        if new.dtype != tensor.dtype:
            if not np.can_cast(new.dtype, tensor.dtype, "same_kind"):
                return
            new = call(ROWS["setitem"], (old, new), {"index": ...})
        chain = [*views_from(tensor)]
        for _, view in chain:
            index, shape = index_in_parent(view)
            if shape is not None:
                new = call(ROWS["reshape"], (new,), {"shape": shape})
            else:
                new = call(ROWS["setitem"], (self._copied(view.parent), new), {"index": index})
        self.renames(base_of(tensor), new)
        for current, view in reversed(chain):
            again = view.op(new, *view.args, **view.kwargs)
            output = getattr(view, "output", None)
            new = again if output is None else again[output]
            self.renames(current, new)

    def _copied(self, tensor: TensorCore) -> Any:
        """A copy of a Tensor: the same value of the program, place in the graph and numbers, in memory of its own."""
        value = self._value_of(tensor)
        other = make(np.copy(tensor._data))
        other._node, other._nr = tensor._node, tensor._nr
        self._values[id(other)] = self._arrays[id(other._data)] = value
        self._alive += [other, other._data]
        return other

    def _check_saved(self) -> None:
        """Break the recording where the eager backward would refuse to run."""
        for node in self._nodes:
            if node._saved.__class__ is tuple:
                try:
                    node.check_versions()
                except ModifiedError:
                    self.breaks("it modifies a tensor in place that its backward needs")
                    return
