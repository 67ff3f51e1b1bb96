"""`checkpoint`: recompute a region of the forward in backward instead of keeping its saved values.

Note [A region and its recomputations]
    The region runs under saved-tensor hooks. Each value that its nodes save is replaced by a number: "the 7th value saved in this region". The
    graph itself stays, so `grad`, `inputs=`, hooks and ``retain_graph`` work as usual. The first time a pass needs a value, the region is
    recomputed under hooks that keep the saved values, this time outside of the caller's graph; the pass takes each value once,
    and it is freed with the node that took it. Values that were not taken are freed when the pass ends, however it ends: recomputations are kept
    in the GraphTask, and the first half of a split backward hands them to the second. A pass recorded with ``create_graph`` gets the values as
    Tensors of the original graph, not of the recomputed one.

Note [Regions in regions]
    The arguments of an inner region are values that the outer one saves: they go through the hooks that are active where `checkpoint` is
    called. When the inner region is needed, it asks for its arguments; for these the outer region is recomputed (once per pass), and then
    the inner one.

Note [Checks of a recomputation]
    Recomputation gets the arguments, grad mode, default dtype and random numbers of the first run (`aiograd.running.random`). The number of saved
    values is compared, and of each value its shape, dtype and up to three elements; that finds a changed order or other random numbers, and
    tolerates the rounding of another number of BLAS threads. Arguments must not have been modified in place.

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
from aiograd.running import foreign_modes
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.random_streams import Draws, Replay
from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Shape
from aiograd.tensors.core import TensorCore, counter_of, outside
from aiograd.tensors.followed import follows_writes
from aiograd.tensors.modified import belongs_to_leaf, modified_error

P = ParamSpec("P")
T = TypeVar("T")

#: the largest deviation of an element, relative to the largest of those compared
TOLERANCE = 0.01


def checkpoint(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``fn(*args, **kwargs)`` without keeping the values it saves for backward; backward recomputes them.

    This trades time for memory: one more forward of `fn` per pass. A plain `fn` is recomputed on the engine's executor, an ``async def`` one on the
    event loop. Gradients are the same as without `checkpoint`, to the bit. `fn` must do the same the second time: random numbers from
    `aiograd.running.random` are repeated, other effects (printing, counting calls) happen again.

    Args:
        fn: a function, ``def`` or ``async def``; may itself contain checkpoints.
        args, kwargs: its arguments; Tensors in nested tuples, lists and dicts of them must not be modified in place until backward.

    Returns:
        The result of `fn`: a coroutine if it is ``async def``, and cancelling that cancels `fn`.

    Raises:
        ArgumentTypeError: `fn` is not a function, or a generator. GraphError: saved-tensor hooks are disabled here.
        In backward: `CheckpointError` if `fn` did something else the second time, `ModifiedError` if a value was modified in place.
    """
    if not callable(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ArgumentTypeError(f"checkpoint: expected a function, `def` or `async def`, found {_name(fn)}")
    levels = [tensor._data.level for tensor in leaves_of((args, kwargs), TensorCore) if follows_writes(tensor._data)]
    if any(level.records and level.kind != "vmap" for level in levels):
        return fn(*args, **kwargs)  # forward mode, whose tangents are recorded with the values
    region = _Region(fn, args, kwargs)
    with region.recording():
        result = fn(*args, **kwargs)
    if inspect.iscoroutine(result):
        region.is_async = True
        return region.record_rest(result)  # type: ignore[return-value]
    region.complete = True
    return result


class Saved(NamedTuple):
    """The facts about a saved value by which its recomputation is checked."""

    shape: Shape
    dtype: np.dtype[Any]
    device: str
    #: first, middle and last element; empty for arrays that do not live on the host
    elements: tuple[Any, ...]
    #: the tensor's version counter, and its version when the value was saved
    counter: list[int]
    version: int
    #: True if it is a leaf that requires grad, or a view of one
    is_leaf: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"

    @classmethod
    def of(cls, tensor: Any) -> Saved:
        """The facts about a Tensor."""
        data = tensor._data
        elements: tuple[Any, ...] = ()
        if isinstance(data, np.ndarray) and data.size:
            elements = (data.item(0), data.item(data.size // 2), data.item(data.size - 1))
        counter = counter_of(tensor)
        return cls(tensor.shape, tensor.dtype, tensor.device, elements, counter, counter[0], belongs_to_leaf(tensor))

    @property
    def is_modified(self) -> bool:
        """True if the tensor has been modified in place since."""
        return self.counter[0] != self.version

    def modified(self, what: str) -> ModifiedError:
        """The error for a value that has been modified; `what` names the value."""
        return modified_error(what, self.shape, self.counter[0], self.version, self.is_leaf)

    def is_close(self, other: Saved) -> bool:
        """True if the elements are the same up to rounding."""
        pairs = [(a, b) for a, b in zip(self.elements, other.elements, strict=False) if a != b and not (a != a and b != b)]
        if not pairs or self.dtype.kind not in "fc":
            return not pairs
        scale = max(abs(element) for element in (*self.elements, *other.elements) if element == element)
        return all(abs(a - b) <= TOLERANCE * scale for a, b in pairs)


class _Argument(NamedTuple):
    """A Tensor among the arguments of a region."""

    #: the Tensor outside of the graph, or its packed form by the hooks of the enclosing region
    value: Any
    hooks: SavedTensorHooks | None
    saved: Saved
    requires_grad: bool


class _Region:
    """One checkpointed call: everything needed to run it again and to check that it did the same."""

    __slots__ = ("function", "args", "kwargs", "grad", "dtype", "draws", "saved", "complete", "is_async", "lock", "foreign")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = current_mode()
        self.function = function
        hold = functools.partial(_hold, hooks=mode.saved_hooks)
        self.args = map_tree(hold, args, TensorCore)
        self.kwargs = map_tree(hold, kwargs, TensorCore)
        self.grad = mode.grad
        self.dtype = mode.dtype
        self.foreign = foreign_modes.noted()
        self.draws = Draws()
        self.saved: list[Saved] = []
        self.complete = False
        self.is_async = False
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"the checkpointed function {_name(self.function)}"

    # ---------------------------------------------------------------- in forward

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace saved values by numbers and record the states of random generators within the block."""
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
        kept: dict[int, Any] = task.plan.recomputed
        recomputation = kept.get(id(self))
        if recomputation is None or recomputation.lacks(number):
            # it refers to the region, so as long as it is kept no other region can have this id
            recomputation = kept[id(self)] = _Recomputation(self)
            return recomputation.run_and_take(number, kept)
        if recomputation.values is not None:
            return recomputation.take(number, kept)
        return recomputation.wait_and_take(number, kept, task.loop)

    async def compute_again(self, caught: _Caught) -> None:
        """Run the function once more; `caught` collects the values it saves."""
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
            # a coroutine rather than a future: the loop keeps the result of a future alive until the waiting task suspends again
            return result if inspect.iscoroutine(result) else None

        coroutine = run() if self.is_async else await current_engine().offload(foreign_modes.within(run, self.foreign))
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
            value = outside(value)
            found[id(argument)] = value.requires_grad_() if argument.requires_grad else value
        return map_tree(lambda argument: found[id(argument)], tree, _Argument)

    def check(self, caught: list[tuple[Any, Saved]]) -> None:
        """Raise unless the recomputed values are the values saved the first time.

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
    """The values that a region saves while it is recomputed."""

    __slots__ = ("values", "lock")

    def __init__(self) -> None:
        #: Tensors outside of the graph, each with the facts at the time it was saved
        self.values: list[tuple[Any, Saved]] = []
        self.lock = threading.Lock()

    def pack(self, tensor: Any) -> int:
        """Keep the value; returns its number."""
        entry = (outside(tensor), Saved.of(tensor))
        with self.lock:
            self.values.append(entry)
            return len(self.values) - 1

    def unpack(self, number: int) -> Any:
        """The value, for a pass that the region runs itself."""
        return self.values[number][0]


class _Recomputation:
    """The recomputed values of a region in one pass. The argument `kept` of its methods is the pass's dict of recomputations."""

    __slots__ = ("region", "values", "waiting")

    def __init__(self, region: _Region) -> None:
        self.region = region
        #: the values that have not been taken yet, by number; None while they are being computed
        self.values: dict[int, tuple[Any, Saved]] | None = None
        self.waiting: list[Any] = []

    def lacks(self, number: int) -> bool:
        """True if the value has been taken already."""
        return self.values is not None and number not in self.values

    async def run_and_take(self, number: int, kept: dict[int, Any]) -> Any:
        try:
            caught = _Caught()
            await self.region.compute_again(caught)
            self.region.check(caught.values)
        except BaseException as error:
            # this fails the pass, which cancels the nodes that wait for the values
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
        # a coroutine begins some time after it was made: the values may have been computed meanwhile
        if self.values is None:
            future = loop.create_future()
            self.waiting.append(future)
            await future
        return self.take(number, kept)

    def take(self, number: int, kept: dict[int, Any]) -> Any:
        """Return a value and drop it.

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
    alone = outside(tensor)
    value = alone if hooks is None else hooks.pack(alone)
    return _Argument(value, hooks, Saved.of(tensor), tensor.requires_grad)


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _short(elements: tuple[Any, ...]) -> str:
    return "(" + ", ".join(f"{element:.4g}" if isinstance(element, (float, complex)) else str(element) for element in elements) + ")"
