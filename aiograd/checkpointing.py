"""`checkpoint`: compute a region of the forward again in backward instead of keeping what it saved.

Note [A region and its recomputations]
    The region runs under saved-tensor hooks. What its nodes would save is replaced by a number: "the 7th value saved in this region". The
    graph itself stays, so `grad`, `inputs=`, hooks and ``retain_graph`` work as ever. The first time a pass needs a value, the region is
    computed again under hooks that catch what is saved, this time outside of the caller's graph; the pass takes each value once,
    and it is freed with the node that took it. What is left over goes when the pass ends, however it ends: recomputations are kept in
    the GraphTask, and where that is the first half of a pass they go on to the second. A pass recorded with ``create_graph`` gets the values in
    the place of the original graph, not of the recomputed one.

Note [Regions in regions]
    The arguments of an inner region are values that the outer one saves: they go through the hooks that are active where `checkpoint` is
    called. When the inner region is needed, it asks for its arguments, which makes the outer one be computed again (once per pass), and the
    inner one then from them.

Note [The same again]
    Recomputation sees the arguments, the grad mode, the default dtype and the random numbers of the first time (`aiograd.random`). Whether
    it did the same is checked: the number of saved values, and of each its shape, dtype and up to three elements, which finds a changed
    order or other random numbers and not the rounding of another number of BLAS threads. Arguments must not have been modified in place.

Rejected: stopping as soon as the last value needed has been saved (then a region that saves more than before goes unnoticed); one
recomputation per saved value; recomputing in ``backward`` of a custom Function (works with neither `grad` nor ``inputs=``).

Source: PyTorch ``utils/checkpoint.py``, the non-reentrant variant; Griewank and Walther's revolve for the idea.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from aiograd.engine.evaluate import suspends
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError, CheckpointError, GraphError, HookTypeError, ModifiedError
from aiograd.graph.current import CURRENT
from aiograd.graph.saved import SavedTensorHooks, saved_tensors_hooks
from aiograd.modes import ModeScope, current_mode
from aiograd.random import Draws, Replay
from aiograd.tensors.core import TensorCore, counter_of
from aiograd.tensors.modified import belongs_to_leaf, modified_error
from aiograd.types import Shape

P = ParamSpec("P")
T = TypeVar("T")

#: how far an element may be off, relative to the largest of those compared
TOLERANCE = 0.01


def checkpoint(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``fn(*args, **kwargs)`` and keep none of what it saves for backward; backward computes it again.

    Memory for time: one more forward of `fn` per pass. A plain `fn` is computed again on the engine's executor, an ``async def`` one on the event
    loop. Gradients are those without `checkpoint`, to the bit. `fn` must do the same the second time: random numbers from
    `aiograd.random` are repeated, other effects (printing, counting calls) happen again.

    Args:
        fn: a function, ``def`` or ``async def``; may itself contain checkpoints.
        args, kwargs: its arguments; Tensors in nested tuples, lists and dicts of them must not be modified in place until backward.

    Returns:
        What `fn` returns: a coroutine if it is ``async def``, and cancelling that cancels `fn`.

    Raises:
        ArgumentTypeError: `fn` is not a function, or a generator. GraphError: saved-tensor hooks are disabled here.
        In backward: `CheckpointError` if `fn` did something else the second time, `ModifiedError` if a value was modified in place.
    """
    if not callable(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ArgumentTypeError(f"checkpoint: expected a function, `def` or `async def`, found {_name(fn)}")
    region = _Region(fn, args, kwargs)
    with region.recording():
        result = fn(*args, **kwargs)
    if inspect.iscoroutine(result):
        region.is_async = True
        return region.record_rest(result)  # type: ignore[return-value]
    region.complete = True
    return result


class Saved(NamedTuple):
    """What is remembered of a saved value."""

    shape: Shape
    dtype: np.dtype[Any]
    device: str
    #: first, middle and last element; empty for arrays that do not live on the host
    elements: tuple[Any, ...]
    #: the tensor's version counter, and where it stood
    counter: list[int]
    version: int
    #: it is a leaf that requires grad, or a view of one
    is_leaf: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"

    @classmethod
    def of(cls, tensor: Any) -> Saved:
        """That of a Tensor."""
        data = tensor._data
        elements: tuple[Any, ...] = ()
        if isinstance(data, np.ndarray) and data.size:
            elements = (data.item(0), data.item(data.size // 2), data.item(data.size - 1))
        counter = counter_of(tensor)
        return cls(tensor.shape, tensor.dtype, tensor.device, elements, counter, counter[0], belongs_to_leaf(tensor))

    @property
    def is_modified(self) -> bool:
        """Whether the tensor has been modified in place since."""
        return self.counter[0] != self.version

    def modified(self, what: str) -> ModifiedError:
        """The error for a value that has been modified; `what` names the value."""
        return modified_error(what, self.shape, self.counter[0], self.version, self.is_leaf)

    def is_close(self, other: Saved) -> bool:
        """Whether the elements are the same up to rounding."""
        pairs = [(a, b) for a, b in zip(self.elements, other.elements, strict=False) if a != b and not (a != a and b != b)]
        if not pairs or self.dtype.kind not in "fc":
            return not pairs
        scale = max(abs(element) for element in (*self.elements, *other.elements) if element == element)
        return all(abs(a - b) <= TOLERANCE * scale for a, b in pairs)


class _Argument(NamedTuple):
    """A Tensor among the arguments of a region."""

    #: the Tensor outside of the graph, or what the hooks of the enclosing region made of it
    value: Any
    hooks: SavedTensorHooks | None
    saved: Saved
    requires_grad: bool


class _Region:
    """One checkpointed call: what is needed to do it again, and to tell whether it was the same."""

    __slots__ = ("function", "args", "kwargs", "grad", "dtype", "draws", "saved", "complete", "is_async", "lock")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = current_mode()
        self.function = function
        hold = functools.partial(_hold, hooks=mode.saved_hooks)
        self.args = map_tree(hold, args, TensorCore)
        self.kwargs = map_tree(hold, kwargs, TensorCore)
        self.grad = mode.grad
        self.dtype = mode.dtype
        self.draws = Draws()
        self.saved: list[Saved] = []
        self.complete = False
        self.is_async = False
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"the checkpointed function {_name(self.function)}"

    # ---------------------------------------------------------------- the first time

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Saved values become numbers, random numbers are noted."""
        with saved_tensors_hooks(self.pack, self.unpack), self.draws.recording():
            yield

    async def record_rest(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self.recording():
            result = await coroutine
        self.complete = True
        return result

    def pack(self, tensor: Any) -> int:
        """The number of the saved value."""
        entry = Saved.of(tensor)
        with self.lock:
            self.saved.append(entry)
            return len(self.saved) - 1

    # ---------------------------------------------------------------- in backward

    def unpack(self, number: int) -> Any:
        """The saved value, or a coroutine that returns it. Called by the engine."""
        current = CURRENT.get()
        if current is None:
            raise GraphError(f"a value saved by {self} can be computed again in a backward pass only: use backward() or grad()")
        task = current.task
        if task.recomputed is None:
            task.recomputed = {}
        kept: dict[int, Any] = task.recomputed
        recomputation = kept.get(id(self))
        if recomputation is None or recomputation.lacks(number):
            # it refers to the region, so as long as it is kept no other region can have this id
            recomputation = kept[id(self)] = _Recomputation(self)
            return recomputation.run_and_take(number, kept)
        if recomputation.values is not None:
            return recomputation.take(number, kept)
        return recomputation.wait_and_take(number, kept, task.loop)

    async def compute_again(self, caught: _Caught) -> None:
        """Run the function once more; `caught` gets what it saves."""
        args = await self._arguments(self.args)
        kwargs = await self._arguments(self.kwargs)
        replay = Replay(self.draws)

        @contextmanager
        def scope() -> Iterator[None]:
            hooks = SavedTensorHooks(caught.pack, caught.unpack)
            with ModeScope(grad=self.grad, dtype=self.dtype, anomaly=None, saved_hooks=hooks, saved_hooks_disabled=None), replay.playing():
                yield

        def run() -> Any:
            with scope():
                result = self.function(*args, **kwargs)
            # nothing but a coroutine: the loop holds on to the result of a future until the waiting task suspends again
            return result if inspect.iscoroutine(result) else None

        coroutine = run() if self.is_async else await current_engine().offload(run)
        if coroutine is not None:
            with scope():
                await coroutine

    async def _arguments(self, tree: Any) -> Any:
        """The arguments as they were, outside of the graph."""
        found: dict[int, Any] = {}
        for argument in leaves_of(tree, _Argument):
            value = argument.value
            if argument.hooks is not None:
                value = argument.hooks.unpack(value)
                if suspends(value):
                    value = await value
                if not isinstance(value, TensorCore):
                    raise HookTypeError(f"unpack hook returned {type(value).__name__}; expected the Tensor that was packed")
            if argument.saved.is_modified:
                raise argument.saved.modified(f"an argument of {self}")
            value = value.detach()
            found[id(argument)] = value.requires_grad_() if argument.requires_grad else value
        return map_tree(lambda argument: found[id(argument)], tree, _Argument)

    def check(self, caught: list[tuple[Any, Saved]]) -> None:
        """Raise unless what was saved again is what was saved the first time.

        Raises:
            CheckpointError, ModifiedError
        """
        if len(caught) != len(self.saved) if self.complete else len(caught) < len(self.saved):
            raise CheckpointError(
                f"{self} saved {len(self.saved)} tensors in forward and {len(caught)} when it was computed again. It must do the same each time: "
                "look for branches on state that has changed since."
            )
        for i, (first, (_, again)) in enumerate(zip(self.saved, caught, strict=False)):
            if first[:3] != again[:3]:
                raise CheckpointError(
                    f"{self} saved {first} as tensor {i} of {len(self.saved)} in forward, and {again} when it was computed again. "
                    "It must do the same each time."
                )
            if not first.is_close(again):
                if first.is_modified:
                    raise first.modified(f"tensor {i} saved by {self}")
                raise CheckpointError(
                    f"{self} saved other values when it was computed again: of tensor {i} of {len(self.saved)}, {first}, the elements looked at "
                    f"were {_short(first.elements)} in forward and {_short(again.elements)} now. Draw random numbers from an aiograd.Generator, "
                    "change no state, and keep the order of operations the same where several tasks record."
                )


class _Caught:
    """What a region saves while it is computed again."""

    __slots__ = ("values", "lock")

    def __init__(self) -> None:
        #: Tensors outside of the graph, each with what it was when it was saved
        self.values: list[tuple[Any, Saved]] = []
        self.lock = threading.Lock()

    def pack(self, tensor: Any) -> int:
        """Keep the value; its number."""
        entry = (tensor.detach(), Saved.of(tensor))
        with self.lock:
            self.values.append(entry)
            return len(self.values) - 1

    def unpack(self, number: int) -> Any:
        """The value, for a pass that the region runs itself."""
        return self.values[number][0]


class _Recomputation:
    """The values of a region in one pass. `kept`, in its methods, is where the pass keeps it."""

    __slots__ = ("region", "values", "waiting")

    def __init__(self, region: _Region) -> None:
        self.region = region
        #: what has not been taken yet, by number; None while it is being computed
        self.values: dict[int, tuple[Any, Saved]] | None = None
        self.waiting: list[Any] = []

    def lacks(self, number: int) -> bool:
        """Whether the value has been taken already."""
        return self.values is not None and number not in self.values

    async def run_and_take(self, number: int, kept: dict[int, Any]) -> Any:
        try:
            caught = _Caught()
            await self.region.compute_again(caught)
            self.region.check(caught.values)
        except BaseException as error:
            # this fails the pass, and with it whoever waits is cancelled
            self._forget(kept)
            if isinstance(error, Exception):
                error.add_note(f"while {self.region} was computed again for backward")
            raise
        self.values = dict(enumerate(caught.values))
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()
        return self.take(number, kept)

    async def wait_and_take(self, number: int, kept: dict[int, Any], loop: Any) -> Any:
        # a coroutine begins some time after it was made: the values may have come meanwhile
        if self.values is None:
            future = loop.create_future()
            self.waiting.append(future)
            await future
        return self.take(number, kept)

    def take(self, number: int, kept: dict[int, Any]) -> Any:
        """Hand out a value and let go of it.

        Raises:
            ModifiedError: it has been modified in place after it was saved, the first time or now.
        """
        values: dict[int, tuple[Any, Saved]] = self.values or {}
        tensor, again = values.pop(number)
        if not values:
            self._forget(kept)
        for saved in (self.region.saved[number], again):
            if saved.is_modified:
                raise saved.modified(f"tensor {number} saved by {self.region}")
        return tensor

    def _forget(self, kept: dict[int, Any]) -> None:
        if kept.get(id(self.region)) is self:
            del kept[id(self.region)]


# -------------------------------------------------------------------- arguments


def _hold(tensor: Any, hooks: SavedTensorHooks | None) -> _Argument:
    outside = tensor.detach()
    value = outside if hooks is None else hooks.pack(outside)
    return _Argument(value, hooks, Saved.of(tensor), tensor.requires_grad)


def map_tree(function: Callable[[Any], Any], tree: Any, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """Nested tuples, lists and dicts with each leaf of type `kind` replaced by ``function(leaf)``."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tree(function, item, kind) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: map_tree(function, item, kind) for key, item in tree.items()}
    return tree


def leaves_of(tree: Any, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    """The leaves of type `kind`, in order."""
    found: list[Any] = []
    map_tree(found.append, tree, kind)
    return found


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _short(elements: tuple[Any, ...]) -> str:
    return "(" + ", ".join(f"{element:.4g}" if isinstance(element, (float, complex)) else str(element) for element in elements) + ")"
