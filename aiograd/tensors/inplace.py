"""In-place modification: version counters, and the change of the graph.

Note [In place is out of place plus a write]
    With a graph to record, ``x += y`` records the out-of-place row, writes its result into the memory of ``x`` and gives ``x`` the node of
    the result. If saved values are overwritten, backward notices it by the version counter, which all views share. The row gets another
    Tensor in place of ``x``; if the row saves it, a copy of the old values is saved, so ``x *= y`` can be differentiated and the
    node of ``x`` never refers to ``x``. Without a graph the value is written directly.

Note [Modifying a view]
    When the modified tensor is a view, its base changes too. The new node of the base is a ``setitem`` of the new value at the
    elements of the view; the view, and each other view of the base when it is used next, gets the node of the same view of the new base.

Note [All or nothing]
    All checks are made before a value is written, and the graph changes after that: an error leaves values, versions and graph as they were.

Source: the rules of PyTorch's ``VariableTypeUtils.h`` (check_inplace) and CopySlices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aiograd.errors import ArgumentTypeError, IndexRangeError, InPlaceError, ShapeError
from aiograd.graph.node import Node
from aiograd.ops import ROWS
from aiograd.running.modes import ModeScope, current_mode
from aiograd.tensors.attach import attach_written
from aiograd.tensors.constants import constant, static
from aiograd.tensors.core import TensorCore, View, base_of, counter_of, make, move_to, refresh, retake, view_of
from aiograd.tensors.followed import follow, follows_writes

_SETITEM, _RESHAPE = ROWS["setitem"], ROWS["reshape"]

#: types of operands, beside tensors
_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic, list, tuple)

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
#: rows with views that show every element of the parent in its order
_SAME_ORDER = frozenset(("reshape", "squeeze", "unsqueeze"))
#: rows with views of which several elements share one place, which cannot be written, and what they did
_SPREAD = {"expand": "it was broadcast", "windows": "its windows overlap"}


def in_place(row: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The augmented assignment of a binary row.

    Args:
        row: its name.
        function: the recorded operation, out of place.
    """
    op = ROWS[row]
    what = f"in-place {row}"
    forward, is_ufunc = op.forward, isinstance(op.forward, np.ufunc)

    def modify(self: Any, other: Any) -> Any:
        mode = current_mode()
        if is_ufunc and not mode.grad and mode.trace is None and mode.mutation is None and self._x is None and isinstance(other, TensorCore):
            # an update by hand: half the time of what follows, which does the same and more (``tests/benchmarks/small_graphs.py``)
            data, given = self._data, other._data
            if other._x is None and _alike(data, given) and data.flags.writeable:
                forward(data, given, data)
                counter = self._vc
                if counter is None:
                    self._vc = [1]
                else:
                    counter[0] += 1
                return self
        check_in_place(self, what)
        is_tensor = isinstance(other, TensorCore)
        refresh(self)
        if is_tensor:
            refresh(other)
        trace = current_mode().trace
        if trace is not None and (is_tensor or isinstance(other, _NUMBERS)):
            operands = (other,) if is_tensor else ()
            rest = () if is_tensor else (static(other),)
            return trace.modifies(
                self, what, functools.partial(modify, self, other), lambda old: function(old, old if other is self else other),
                lambda array, *others: _into(op, array, *others, *rest), operands,
            )  # fmt: skip
        plain = isinstance(self._data, np.ndarray) and is_ufunc and not (is_tensor and other._data.__class__ is not np.ndarray)
        if plain and not _records(self, other if is_tensor else None):
            if not is_tensor and not isinstance(other, _NUMBERS):
                return NotImplemented
            other = other._data if is_tensor else static(other)
            before_write(self)
            try:
                op.forward(self._data, other, out=self._data)
            except (TypeError, OverflowError) as error:
                raise ArgumentTypeError(f"{what}, a tensor of dtype {self.dtype}: {error}. The result must fit the tensor's dtype.") from None
            except ValueError as error:
                raise ShapeError(f"{what}, a tensor of shape {list(self.shape)}: {error}. The result must fit the tensor's shape.") from None
            counter_of(self)[0] += 1
            return self
        return replace(self, what, lambda old: function(old, old if other is self else other), one_row=True)

    return modify


def _alike(data: Any, given: Any) -> bool:
    """True for two host arrays of floats of the same shape and dtype, of which a ufunc makes a third one like them."""
    dtype = data.dtype
    return (
        data.__class__ is np.ndarray
        and given.__class__ is np.ndarray
        and dtype is given.dtype
        and (dtype is _FLOAT32 or dtype is _FLOAT64)
        and data.shape == given.shape
    )


def replace(tensor: TensorCore, what: str, compute: Callable[[Any], Any], *, one_row: bool = False) -> Any:
    """Give a tensor the values and the place in the graph of ``compute(old)``, an operation out of place; returns the tensor.

    Args:
        tensor: the tensor to modify, which `check_in_place` has let through.
        what: name of the operation, for messages.
        compute: gets another Tensor in place of `tensor`; NotImplemented as its result is returned, and nothing is changed.
        one_row: it records one node, so that every node that may save the old values is known.
    """
    old = stand_in(tensor)
    mode = current_mode()
    if mode.saved_hooks is not None or (mode.grad and not one_row):
        old._data = np.copy(old._data)  # hooks may keep any part of their arguments, and nodes before the last one too
    value = compute(old)
    if value is NotImplemented:
        return value
    node = value._node
    if one_row and node is not None and node._saved.__class__ is tuple and any(saved is old for saved in node._saved):
        old._data = np.copy(old._data)
    _assign(tensor, value, what)
    return tensor


def set_item(tensor: TensorCore, index: Any, value: Any, what: str) -> None:
    """``tensor[index] = value``; `index` holds no Tensors.

    Raises:
        InPlaceError: see `check_in_place`. ShapeError, ArgumentTypeError, IndexRangeError: value or index do not fit.
    """
    check_in_place(tensor, what)
    if not isinstance(value, TensorCore):
        value = constant(value, tensor.dtype)
    if value.device != tensor.device and (value.shape or value._node is not None) and not _follows(tensor._data, value._data):
        value = value.to(tensor.device)
    if value.dtype.kind == "c" and tensor.dtype.kind != "c":
        raise ArgumentTypeError(f"{what}: complex values do not fit a tensor of dtype {tensor.dtype}. Take np.real() of them.")
    refresh(tensor)
    refresh(value)
    records = _records(tensor, value)
    if records:
        check_view(tensor, what)
    trace = current_mode().trace
    if trace is not None:
        trace.modifies(
            tensor, what, functools.partial(set_item, tensor, index, value, what), lambda old: _SETITEM(old, value, index=index),
            lambda array, other, index: array.__setitem__(index, other), (value,), index,
        )  # fmt: skip
        return
    old = stand_in(tensor)
    before_write(tensor)
    try:
        store(tensor, index, value._data)
    except IndexError as error:
        raise IndexRangeError(f"{what}, a tensor of shape {list(tensor.shape)}: {error}") from None
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{what}, a tensor of shape {list(tensor.shape)}: {error}") from None
    if value._node is None and selects_nothing(index):
        for _, view in views_from(tensor):
            view.version = counter_of(tensor)[0]
        return  # a mask that selects nothing modifies nothing: libraries write rare elements so, infinities for example
    counter_of(tensor)[0] += 1
    if records:
        move_with_parents(tensor, *attach_written(_SETITEM, [old, value], {"index": index}, tensor._data))


def selects_nothing(index: Any) -> bool:
    """True for a mask without a True."""
    return isinstance(index, np.ndarray) and index.dtype == np.bool_ and not index.any()


def check_in_place(tensor: TensorCore, what: str) -> None:
    """Raise where modifying the tensor in place would lose a gradient or cannot be done.

    Raises:
        InPlaceError: it is a leaf that requires grad, or a view of one, and operations are being recorded; or its memory cannot be written to.
    """
    data = tensor._data
    follows = data.__class__ is not np.ndarray and follows_writes(data)
    if follows and base_of(tensor)._data.is_fixed:
        raise InPlaceError(f"{what}: the tensor is an input of the function that jvp() differentiates, or a view of one. Use clone() first.")
    flags = data.flags if follows or isinstance(data, np.ndarray) else None
    if flags is not None and (not flags.writeable or (follows and _is_spread(tensor))):
        raise InPlaceError(f"{what}: the tensor's memory is read-only, because {_read_only_cause(tensor)}. Use clone() first.")
    if not current_mode().grad:
        return
    if tensor._node is not None and tensor._node.is_leaf:
        raise InPlaceError(
            f"{what}: a leaf Variable that requires grad is being used in an in-place operation. Use no_grad(), or an out-of-place operation."
        )
    base = base_of(tensor)
    if base is not tensor and base._node is not None and base._node.is_leaf:
        raise InPlaceError(
            f"{what}: a view of a leaf Variable that requires grad is being used in an in-place operation. Use no_grad(), or clone it first."
        )


def _is_spread(tensor: TensorCore) -> bool:
    """True for a view with elements that share one place, of which a level may hold values with a place each."""
    return any([view.op.name in _SPREAD for _, view in views_from(tensor)])


def _read_only_cause(tensor: TensorCore) -> str:
    for _, view in views_from(tensor):
        if view.op.name == "diagonal":
            return "numpy allows no writing through diagonal(); to change the diagonal itself assign to elements, x[i, i] with i = arange(n)"
        if view.op.name in _SPREAD:
            return f"several of its elements share one place since {_SPREAD[view.op.name]}"
    return "whoever owns the array said so"


def check_view(tensor: TensorCore, what: str) -> None:
    """Raise where the graph cannot follow a modification through this view.

    Raises:
        InPlaceError
    """
    for _, view in views_from(tensor):
        if view.obstacle is not None:
            raise InPlaceError(
                f"{what}: the tensor is a view that {view.obstacle}, so the graph cannot follow a modification of it. Use clone() first."
            )


def write(tensor: TensorCore, data: Any) -> None:
    """Write values into the tensor's memory and count the modification; the graph is the caller's business."""
    before_write(tensor)
    store(tensor, ..., data)
    counter_of(tensor)[0] += 1


def perform(name: str, function: Callable[..., None], *tensors: TensorCore) -> None:
    """Run ``function(*arrays)`` for its effect on tensors that it knows, such as running statistics; a compiled function repeats it at every run.

    Args:
        name: of the effect, for people.
        function: takes the arrays of `tensors`.
    """
    trace = current_mode().trace
    if trace is None:
        function(*[tensor._data for tensor in tensors])
        return
    with ModeScope(trace=None):
        function(*[tensor._data for tensor in tensors])
    trace.performs(name, function, tensors)


def before_write(tensor: TensorCore) -> None:
    """Give `allow_mutation_on_saved_tensors` the chance to copy the old values."""
    mode = current_mode()
    if mode.mutation is not None:
        mode.mutation.before_write(tensor)
    if mode.trace is not None:
        mode.trace.breaks("it modifies a tensor in place")


def move_with_parents(tensor: TensorCore, node: Node | None, nr: int) -> None:
    """Make a tensor that was modified in place output `nr` of `node`, and update the place of its base in the graph accordingly.

    See Note [Modifying a view].
    """
    chain = [*views_from(tensor)]
    for current, view in chain:
        part = make(current._data)
        part._node, part._nr = node, nr
        node, nr = _in_parent(part, view)
    move_to(base_of(tensor), node, nr)
    counter = counter_of(tensor)[0]
    for current, view in reversed(chain):
        view.version = counter
        retake(current, view, stand_in(view.parent))


def views_from(tensor: TensorCore) -> Iterator[tuple[TensorCore, View]]:
    """A view and its parents that are views, each with how it is made."""
    while (view := view_of(tensor)) is not None:
        yield tensor, view
        tensor = view.parent


def stand_in(tensor: TensorCore) -> Any:
    """Another Tensor with the same data and the same place in the graph, and with a version counter of its own."""
    other = make(tensor._data)
    other._node, other._nr = tensor._node, tensor._nr
    return other


# -------------------------------------------------------------------- steps


def _records(tensor: TensorCore, value: TensorCore | None) -> bool:
    """True if the modification has to be recorded."""
    return current_mode().grad and (tensor._node is not None or (value is not None and value._node is not None) or base_of(tensor)._node is not None)


def _follows(data: Any, value: Any) -> bool:
    return follows_writes(data) or follows_writes(value)


def store(tensor: TensorCore, index: Any, value: Any) -> None:
    """Write into the tensor's memory. A level that follows writes gives the tensor, and the bases of a view, arrays of its own."""
    held = tensor._data
    if held.__class__ is value.__class__ is np.ndarray or not _follows(held, value):
        held[index] = value
        return
    if not follows_writes(tensor._data) and not (value.is_followed and current_mode().tangents):
        tensor._data[index] = value.plain
        return
    deepest: Any = max(filter(follows_writes, (tensor._data, value)), key=lambda array: array.level.depth)
    chain, base = [*views_from(tensor)], base_of(tensor)
    follow(base, deepest.lifted(base._data))
    with ModeScope(tangents=True):  # under no_grad too they have the tangents that their base has
        for child, view in reversed(chain):
            retake(child, view, view.parent)
    tensor._data[index] = value
    for child, view in chain:
        view.parent._data.take_part(child._data, *index_in_parent(view))
        view.version = counter_of(tensor)[0] + 1


def _assign(tensor: TensorCore, value: TensorCore, what: str) -> None:
    """Write the result of a row into the tensor and take over its place in the graph."""
    shape, dtype = tensor.shape, tensor.dtype
    if value.shape != shape:
        raise ShapeError(
            f"{what}: a result of shape {list(value.shape)} does not fit in place into shape {list(shape)}. Use the out-of-place operation."
        )
    if value.dtype != dtype and not np.can_cast(value.dtype, dtype, "same_kind"):
        raise ArgumentTypeError(f"{what}: a result of dtype {value.dtype} does not fit in place into dtype {dtype}. Use the out-of-place operation.")
    records = _records(tensor, value)
    if records:
        check_view(tensor, what)
    old = stand_in(tensor)
    write(tensor, value._data)
    if not records:
        return
    if value._node is None or value.dtype != dtype:
        move_with_parents(tensor, *attach_written(_SETITEM, [old, value], {"index": ...}, tensor._data))
    else:
        move_with_parents(tensor, value._node, value._nr)


def _in_parent(part: TensorCore, view: View) -> tuple[Node | None, int]:
    """The place of a view's parent after the view has become `part`."""
    parent = view.parent
    index, shape = index_in_parent(view)
    if shape is not None:
        return attach_written(_RESHAPE, [part], {"shape": shape}, parent._data)
    return attach_written(_SETITEM, [stand_in(parent), part], {"index": index}, parent._data)


def index_in_parent(view: View) -> tuple[Any, Any]:
    """Where the elements of a view are in its parent: an index and None, or None and the parent's shape if these are all, in the same order."""
    parent = view.parent
    if view.op.name in _SAME_ORDER:
        return None, parent.shape
    if view.op.name == "getitem":
        return view.args[0] if view.args else view.kwargs["index"], None
    positions = view.op(np.arange(parent.size).reshape(parent.shape), *view.args, **view.kwargs)
    return np.unravel_index(positions if view.output is None else positions[view.output], parent.shape), None


def _into(op: Any, array: Any, other: Any) -> None:
    """The row's result for two arrays, written into the first."""
    if isinstance(op.forward, np.ufunc):
        op.forward(array, other, out=array)
    else:
        array[...] = op.forward(array, other)
