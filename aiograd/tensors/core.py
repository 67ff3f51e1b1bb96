"""TensorCore: the state of a Tensor and its methods that are not operations.

Note [Five slots]
    ``_data``: the array. ``_node``: the node at which its gradient arrives: None (no gradient wanted), the AccumulateGrad of a leaf, or the node
    of the operation that made it; ``requires_grad``, ``is_leaf`` and ``grad_fn`` are derived from it. ``_nr``: the number of the node's input.
    ``_vc``: the list ``[n]`` that counts in-place modifications, shared with views; None until there is anything to count or share. ``_x``: the
    rarely used rest. A Tensor is made for every recorded operation, so it has no other slots. A ``__dict__`` would cost each Tensor 32 bytes and
    2 % of the time of an operation (CPython 3.11), so only Parameters, which are few, and a user's subclasses have one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any, Self

import numpy as np

from aiograd.engine.run import loop_is_running
from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceMismatchError, GraphError, InPlaceError, NotReadyError, ShapeError
from aiograd.graph.accumulate_grad import SOLE_OWNER, AccumulateGrad
from aiograd.graph.hooks import RemovableHandle
from aiograd.graph.node import Node
from aiograd.graph.programs import opened_at
from aiograd.running import devices
from aiograd.running.modes import ModeScope, current_mode, tell_compiler
from aiograd.running.types import Array, Shape
from aiograd.tensors.accumulated import TensorExtra, new_leaf, seen_gradient, switched_off
from aiograd.tensors.followed import follow, follows_writes, without_tangent
from aiograd.tensors.followed import has_tangent as has_tangent
from aiograd.tensors.plain import plain_array
from aiograd.tensors.size import TensorSize, size_of


class View:
    """The record of how a view was made: ``op(parent, *args, **kwargs)``, when the version counter was at `version`."""

    __slots__ = ("parent", "op", "args", "kwargs", "version")

    #: number of the output of `op`, None where `op` has one output only
    output: int | None = None
    #: True if it keeps its place in the graph when the parent is modified in place
    is_frozen: bool = False
    #: the reason why it cannot be modified in place while a graph is recorded, None where it can
    obstacle: str | None = None

    def __init__(self, parent: TensorCore, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], version: int) -> None:
        self.parent = parent
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.version = version


class SpecialView(View):
    """A view that is one of several, that was taken without recording, or that a custom Function returned."""

    __slots__ = ("output", "is_frozen", "obstacle")

    def __init__(self, *view: Any, output: int | None, is_frozen: bool, obstacle: str | None) -> None:
        super().__init__(*view)
        self.output = output
        self.is_frozen = is_frozen
        self.obstacle = obstacle


class TensorCore:
    """State and attributes of a Tensor; operations are added by `aiograd.tensors.tensor.Tensor`."""

    __slots__ = ("_data", "_node", "_nr", "_vc", "_x", "__weakref__")

    _data: Array
    _node: Node | None
    _nr: int
    _vc: list[int] | None
    _x: TensorExtra | None

    # ---------------------------------------------------------------- attributes

    @property
    def shape(self) -> Shape:
        """Extent of each axis."""
        return self._data.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._data.shape)

    @property
    def size(self) -> TensorSize:
        """Number of elements: an int. Called as in PyTorch, ``x.size()`` is the shape and ``x.size(0)`` the extent of an axis."""
        return size_of(self._data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._data.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> devices.DeviceName:
        """``"cpu"`` or the name of the device the data lives on: a str with PyTorch's ``type`` and ``index``."""
        return devices.name_of_device(devices.device_name_of(self._data))

    @property
    def requires_grad(self) -> bool:
        """True if operations on this tensor record a graph. Settable on leaves."""
        if self._x is not None:
            refresh(self)
        return self._node is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def is_leaf(self) -> bool:
        """True if no recorded operation made this tensor."""
        if self._x is not None:
            refresh(self)
        return self._node is None or self._node.is_leaf

    @property
    def grad_fn(self) -> Node | None:
        """The backward node of the operation that made this tensor; None for a leaf."""
        refresh(self)
        return None if self._node is None or self._node.is_leaf else self._node

    @property
    def version(self) -> int:
        """How often the values have been modified in place, through this tensor or a view of the same data."""
        return 0 if self._vc is None else self._vc[0]

    @property
    def grad(self) -> Any:
        """The accumulated gradient: a Tensor, or None. Settable."""
        grad = seen_gradient(self)
        trace = current_mode().trace
        if trace is not None:
            trace.looks_at_grad(self, grad)
        return grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            if not isinstance(value, TensorCore):
                raise ArgumentTypeError(f"setting .grad to {type(value).__name__}: expected a Tensor of shape {list(self.shape)}, or None")
            if value is self:
                raise ArgumentError("setting .grad of a tensor to the tensor itself")
            if value.shape != self.shape:
                raise ShapeError(f"setting .grad: got shape {list(value.shape)}, expected {list(self.shape)}")
            if value.dtype != self.dtype:
                raise ArgumentTypeError(f"setting .grad: got dtype {value.dtype}, expected {self.dtype}. Cast it with .astype().")
            if value.device != self.device:
                raise DeviceMismatchError(f"setting .grad: it lives on {value.device}, the tensor on {self.device}. Move it with .to().")
        trace = current_mode().trace
        if trace is not None:
            if value is None:
                trace.forgets_grad(self, _set_grad)
            else:
                trace.acts("setting .grad", _set_grad, self, value)
            return
        node = self._node
        if node is not None and node.is_leaf:
            node.grad = value  # type: ignore[attr-defined]
        else:
            extra_of(self).grad = value

    # ---------------------------------------------------------------- requiring and retaining gradients

    def requires_grad_(self, value: bool = True) -> Self:
        """Switch `requires_grad` of a leaf on or off, in place; returns the tensor.

        Its gradient and hooks stay. Graphs that were recorded while it was on still bring gradients to it.

        Raises:
            GraphError: switching it off on a tensor made by a recorded operation. ArgumentTypeError: the dtype is not floating point.
        """
        if value:
            if self._node is None:
                if self._data.dtype.kind not in "fc":
                    raise ArgumentTypeError(
                        f"requires_grad_(): only tensors of floating point and complex dtype can require gradients, found {self.dtype}"
                    )
                self._node, self._nr = new_leaf(self), 0
                if (trace := current_mode().trace) is not None:
                    trace.makes_leaf(self)
        elif self._node is not None:
            if not isinstance(self._node, AccumulateGrad):
                raise GraphError("you can only change requires_grad flags of leaf variables: this tensor was made by an operation. Use detach().")
            if (leaf := switched_off(self)) is not None:
                extra_of(self).leaf = leaf
        return self

    def retain_grad(self) -> None:
        """Keep the gradient of this non-leaf in `grad`. It accumulates over passes and sees the effect of every hook on the tensor.

        Raises:
            GraphError: the tensor does not require grad.
        """
        refresh(self)
        node = self._node
        if node is None:
            raise GraphError("can't retain_grad on Tensor that has requires_grad=False")
        if node.is_leaf:
            return
        place, nr = opened_at(node, self._nr)
        extra = extra_of(self)
        if extra.retains is not place:
            if place is not node:
                move_to(self, place, nr)
            extra.retains = place
            place.extra.retain_hooks[nr] = _Retainer(self)

    @property
    def retains_grad(self) -> bool:
        """True if `retain_grad` is in effect."""
        return self._x is not None and self._x.retains is not None

    def register_hook(self, hook: Callable[[Any], Any]) -> RemovableHandle:
        """Call ``hook(grad)`` with the summed gradient of this tensor, once per pass; it returns None or a replacement.

        Hooks run in order of registration, before the node's own; they may be ``async def``. The hook belongs to this tensor's
        present place in the graph: it does not move to the tensor's new node after a later in-place operation.

        Raises:
            GraphError: the tensor does not require grad.
        """
        refresh(self)
        if self._node is None:
            raise GraphError("cannot register a hook on a tensor that doesn't require gradient")
        if not callable(hook):
            raise ArgumentTypeError(f"register_hook: expected a callable, found {type(hook).__name__}")
        tell_compiler("registers a hook")
        return self._node.tensor_hooks(self._nr).add(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any], *, eager: bool = False) -> RemovableHandle:
        """Call ``hook(leaf)`` after the gradient of this leaf has been accumulated; it returns None and may be ``async def``.

        Args:
            eager: accumulate and call the hook as soon as the gradient is complete, instead of after the commit of the whole pass. Frees
                gradients early (optimizer in backward), and is the one exception to "a failed pass changes nothing".

        Raises:
            GraphError: not a leaf that requires grad.
        """
        node = self._node
        if node is None or not node.is_leaf:
            raise GraphError("post accumulate grad hooks cannot be registered on non-leaf tensors, nor on leaves that do not require grad")
        if not callable(hook):
            raise ArgumentTypeError(f"register_post_accumulate_grad_hook: expected a callable, found {type(hook).__name__}")
        tell_compiler("registers a hook")
        return node.register_post_accumulate(hook, eager)  # type: ignore[attr-defined,no-any-return]

    # ---------------------------------------------------------------- leaving the graph

    def detach(self) -> Self:
        """The same data outside of the graph, without tangents. Modifying either in place is noticed by both."""
        return make(without_tangent(self._data, self), shared_with=self, cls=type(self))  # type: ignore[no-any-return]

    def detach_(self) -> Self:
        """Take this tensor out of the graph, in place."""
        if self._x is not None and self._x.view is not None:
            raise InPlaceError("can't detach views in-place: use detach() instead")
        if self._node is not None and self._node.is_leaf:
            return self.requires_grad_(False)
        move_to(self, None, 0)
        return self

    # ---------------------------------------------------------------- awaiting

    def __await__(self) -> Generator[Any, Any, Self]:
        """Wait until the data has been computed (device event, remote result); host data needs no waiting. Cancelling only stops the waiting."""
        wait = getattr(self._data, "__aiograd_wait__", None)
        if wait is not None:
            yield from wait().__await__()
        return self


class _Retainer:
    """Adds the gradient of a non-leaf to its ``grad``; refers to the tensor weakly. Returns a function that writes the sum, for the commit."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: TensorCore) -> None:
        self.tensor = weakref.ref(tensor)

    def __call__(self, grad: Any) -> Callable[[], None] | None:
        tensor = self.tensor()
        if tensor is None:
            return None
        extra = extra_of(tensor)
        if extra.grad is not None:
            total = extra.grad + grad
        else:
            total = grad if _is_alone(grad) else grad.clone()
        return functools.partial(setattr, extra, "grad", total)


def _is_alone(tensor: TensorCore) -> bool:
    """True if only this Tensor, which is in no graph, refers to its array."""
    data = tensor._data
    return tensor._node is None and data.__class__ is np.ndarray and data.base is None and sys.getrefcount(data) <= SOLE_OWNER + 1


#: the final class of Tensors, which `aiograd.tensors.tensor` sets
TENSOR_CLASS: list[type[Any]] = [TensorCore]


def make(data: Array, *, shared_with: TensorCore | None = None, cls: type[Any] | None = None) -> Any:
    """A Tensor of `data`, outside of any graph.

    Args:
        data: ndarray, numpy scalar or device array; not copied. See `plain_array` for subclasses of ndarray.
        shared_with: a tensor with the same data, to share the version counter with.
        cls: class of the tensor.
    """
    if data.__class__ is not np.ndarray:
        data = plain_array(data)
    tensor: Any = TENSOR_CLASS[0]() if cls is None else object.__new__(cls)  # a subclass may have a constructor of its own
    tensor._data = data
    tensor._node = tensor._x = None
    tensor._nr = 0
    tensor._vc = None if shared_with is None else counter_of(shared_with)
    return tensor


def outside(tensor: TensorCore) -> Any:
    """The same data outside of the graph; unlike `TensorCore.detach` it keeps its tangents."""
    refresh(tensor)
    return make(tensor._data, shared_with=tensor, cls=type(tensor))


def _set_grad(tensor: TensorCore, value: Any = None) -> None:
    tensor.grad = value


def view_of(tensor: TensorCore) -> View | None:
    """The record of how a view was made; None for a tensor that is no view."""
    return None if tensor._x is None else tensor._x.view


def base_of(tensor: TensorCore) -> TensorCore:
    """The tensor at the start of a chain of views."""
    while (view := view_of(tensor)) is not None:
        tensor = view.parent
    return tensor


def counter_of(tensor: TensorCore) -> list[int]:
    """The tensor's version counter, made if there was none."""
    if tensor._vc is None:
        tensor._vc = [0]
    return tensor._vc


def extra_of(tensor: TensorCore) -> TensorExtra:
    """The tensor's `TensorExtra`, made if there was none."""
    if tensor._x is None:
        tensor._x = TensorExtra()
    return tensor._x


def refresh(tensor: TensorCore) -> None:
    """Recompute a view's place in the graph after its data was modified through another tensor."""
    extra = tensor._x
    if extra is None or (view := extra.view) is None or tensor._vc is None or view.version == tensor._vc[0]:
        return
    counter = tensor._vc[0]
    stale: list[tuple[TensorCore, View]] = []
    current = tensor
    while current._x is not None and (view_of := current._x.view) is not None and view_of.version != counter:
        view_of.version = counter
        if view_of.is_frozen or (current._node is not None and current._node.is_leaf):
            trace = current_mode().trace
            if trace is not None:
                trace.breaks("it uses a view of a tensor that has been modified in place")
            break
        stale.append((current, view_of))
        current = view_of.parent
    with ModeScope(grad=True, tangents=True):
        for current, view_of in reversed(stale):
            retake(current, view_of, view_of.parent)


def retake(tensor: TensorCore, view: View, parent: TensorCore) -> None:
    """Give `tensor` the place in the graph of the same view of `parent`."""
    trace = current_mode().trace
    followed = follows_writes(parent._data)
    if parent._node is None and trace is None and not followed:
        move_to(tensor, None, 0)
        return
    again = view.op(parent, *view.args, **view.kwargs)
    if view.output is not None:
        again = again[view.output]
    if followed:
        follow(tensor, again._data)
    if trace is not None:
        trace.renames(tensor, again)
    move_to(tensor, again._node, again._nr)


def move_to(tensor: TensorCore, node: Node | None, nr: int) -> None:
    """Give a tensor another place in the graph; a retained gradient is from now on the one that arrives there."""
    extra = tensor._x
    if extra is not None and extra.leaf is not None:
        _, extra.grad = extra.taken_leaf()
    if extra is not None and extra.retains is not None:
        extra.retains.extra.retain_hooks.pop(tensor._nr, None)
        extra.retains = node
        if node is not None:
            node.extra.retain_hooks[nr] = _Retainer(tensor)
    tensor._node, tensor._nr = node, nr


def tell_read(tensor: TensorCore) -> None:
    """Tell a recording that the values of a tensor leave it, so that a program could not follow them."""
    trace = current_mode().trace
    if trace is not None:
        trace.reads_values(tensor)


def host_array(tensor: TensorCore) -> np.ndarray[Any, Any]:
    """The values as a numpy array.

    Raises:
        NotReadyError: they are still being computed and an event loop is running.
    """
    tell_read(tensor)
    data = tensor._data
    if isinstance(data, np.ndarray):
        return data
    ready = getattr(data, "__aiograd_is_ready__", None)
    if ready is not None and not ready() and loop_is_running():
        raise NotReadyError("reading a tensor whose data is still being computed would block the event loop: `await` the tensor first")
    device: Any = devices.device(devices.device_name_of(data))
    return device.to_host(data)  # type: ignore[no-any-return]
