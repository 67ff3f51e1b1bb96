"""State that follows the caller: grad mode, anomaly mode, saved-tensor hooks, profiler, default dtype.

All of it lives in one ContextVar, so it belongs to the asyncio task (and travels to threads with ``copy_context``): a task suspended
inside ``no_grad`` switches nothing off for another. Below it lies a default of the process, which holds wherever a context has nothing of
its own: other threads, the next statement of a REPL.

Note [One variable for every mode]
    Recording an operation reads the modes once per call, so they share one immutable `Mode` with the two questions the hot path asks
    precomputed (`plain`: gradients on and nothing else to do; `grad`). Each entered mode links to the one it was entered in
    (`outer`), so leaving needs no token: it restores `outer` after checking that the mode on top is the one being left. Leaving in
    another task or thread is thereby a clear error instead of a silent corruption. Changes by a function such as `set_default_dtype`
    within a block outlast it: leaving takes back only the changes of the block itself. Measured by ``tests/benchmarks/small_graphs.py``.

Note [The default of the process]
    `DEFAULT_MODE` is the mode of a context without one of its own. A function such as `set_default_dtype` changes it, in place, when it is
    called at the top level (Note [Top level] in `aiograd.running.top_level`) and not in a block of the same setting; anywhere else it changes the
    running context. A mode that is entered takes over the other settings of that moment.

Rejected: a ContextVar per mode (three more reads per recorded op); thread-locals (leak between tasks).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np

from aiograd.errors import ArgumentError, ModeError
from aiograd.running.top_level import is_statement, is_top_level

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING: frozenset[str] = frozenset()

_FIELDS = ("grad", "anomaly", "saved_hooks", "saved_hooks_disabled", "mutation", "profiler", "trace", "collect", "dtype", "tangents")


class Mode:
    """An immutable set of modes (but see Note [The default of the process]); derive another with `having`."""

    __slots__ = (*_FIELDS, "plain", "collects", "watched", "outer", "owner", "switched")

    grad: bool
    #: anomaly mode: None (off), else True to check for NaN
    anomaly: bool | None
    #: innermost pair of saved-tensor hooks, or None
    saved_hooks: Any
    #: message of `disable_saved_tensors_hooks`, or None
    saved_hooks_disabled: str | None
    #: its `before_write` is called before a tensor is modified in place; or None
    mutation: Any
    profiler: Any
    #: is told of every row that runs, and of every step that a compiled function could not repeat; or None (see `aiograd.compiler.recording`)
    trace: Any
    #: called with every node that is recorded, or None (used by a pass that records a graph itself, see Note [Numbers of a recorded pass])
    collect: Callable[[Any], None] | None
    dtype: np.dtype[Any]
    #: False where operations stop the tangents of forward mode, as in `no_grad`
    tangents: bool
    plain: bool
    #: True if it is plain but for a pass that collects the recorded nodes
    collects: bool
    #: True if a recording or a profiler is told of every row that runs
    watched: bool
    outer: Mode | None
    #: the `ModeScope` or generator that entered it
    owner: Any
    #: names of the fields changed by functions such as `set_default_dtype`; these changes outlast the block
    switched: frozenset[str]

    def having(self, *, outer: Mode | None, owner: Any, **changes: Any) -> Mode:
        """A copy with some fields changed."""
        mode = object.__new__(Mode)
        mode.grad = self.grad
        mode.anomaly = self.anomaly
        mode.saved_hooks = self.saved_hooks
        mode.saved_hooks_disabled = self.saved_hooks_disabled
        mode.mutation = self.mutation
        mode.profiler = self.profiler
        mode.trace = self.trace
        mode.collect = self.collect
        mode.dtype = self.dtype
        mode.tangents = self.tangents
        mode.outer = outer
        mode.owner = owner
        mode.switched = _NOTHING
        mode.change(changes)
        return mode

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change some fields of it."""
        self.plain = self.collects = False  # another thread that reads it meanwhile looks at the fields
        for name, value in changes.items():
            setattr(self, name, value)
        self.watched = self.profiler is not None or self.trace is not None
        plain = self.grad and self.anomaly is None and self.saved_hooks is None and not self.watched
        self.plain, self.collects = plain and self.collect is None, plain and self.collect is not None


def _first_mode() -> Mode:
    mode = object.__new__(Mode)
    mode.grad = mode.plain = mode.tangents = True
    mode.switched = _NOTHING
    mode.watched = mode.collects = False
    mode.anomaly = mode.saved_hooks = mode.saved_hooks_disabled = mode.mutation = mode.profiler = mode.trace = mode.collect = None
    mode.outer = mode.owner = None
    mode.dtype = np.dtype(np.float32)
    return mode


DEFAULT_MODE = _first_mode()
_mode: ContextVar[Mode] = ContextVar("aiograd_mode", default=DEFAULT_MODE)

#: the caller's `Mode` (bound once: this is called for every recorded operation)
current_mode = _mode.get


def tell_compiler(what: str) -> None:
    """Tell a function that is being recorded of something that its program could not repeat, such as "registers a hook"."""
    trace = current_mode().trace
    if trace is not None:
        trace.breaks(f"it {what}")


def restore_mode(mode: Mode) -> None:
    """Make `mode` the caller's again, after code that had entered other modes was left midway and continues in a task of its own."""
    _mode.set(mode)


class ModeScope:
    """Context manager and decorator that changes some fields of the mode.

    As a decorator it works on ``def``, ``async def``, generators and async generators: the mode is on while the function's own code
    runs and off whenever it has yielded to its consumer.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def _check_entry(self) -> None:
        """Raise where the mode cannot be entered now."""

    def __enter__(self) -> Self:
        self._check_entry()
        current = current_mode()
        _mode.set(current.having(outer=current, owner=self, **self._changes))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        current = current_mode()
        if current.owner is not self:
            raise ModeError(
                f"leaving {type(self).__name__}: it is not the innermost mode of this task. It was entered in another task, thread or generator "
                "step, or modes were left in another order than they were entered. Use the decorator form around generators."
            ) from error
        outer = current.outer
        if outer is None:
            raise ModeError(f"leaving {type(self).__name__}, which was never entered")
        if current.switched:
            changes = {name: getattr(current, name) for name in current.switched - self._changes.keys()}
            changes = {name: value for name, value in changes.items() if value is not getattr(outer, name)}
            if changes:
                outer = _switched(outer, changes)
        _mode.set(outer)

    def _again(self) -> ModeScope:
        """A scope with the same effect, for one call of a decorated function."""
        scope = ModeScope(**self._changes)
        scope._check_entry = self._check_entry  # type: ignore[method-assign]
        return scope

    def __call__(self, function: F) -> F:
        if inspect.isclass(function):
            raise ArgumentError(f"{type(self).__name__} decorates functions; {function.__name__} is a class: decorate its methods")
        return cast(F, _decorate(function, self._again))


def _switched(mode: Mode, changes: Mapping[str, Any]) -> Mode:
    """`mode` with fields that a function has changed, not a block."""
    switched = mode.having(outer=mode.outer, owner=mode.owner, **changes)
    switched.switched = mode.switched | changes.keys()
    return switched


def _switch(everywhere: bool, **changes: Any) -> None:
    """Change fields of the mode from here on, not for a block; `everywhere` for the process, unless this is in a block of the same setting."""
    current = current_mode()
    mode = current
    while mode.outer is not None:
        everywhere = everywhere and not mode.owner._changes.keys() & changes.keys()
        mode = mode.outer
    if everywhere:
        DEFAULT_MODE.change(changes)
    if current is not DEFAULT_MODE or not everywhere:
        _mode.set(_switched(current, changes))


class _GeneratorModes:
    """The modes of one decorated generator: on while its own code runs, put aside whenever it has yielded.

    Modes that the generator's body has entered and not left when it yields come back when it goes on.
    """

    __slots__ = ("_scope", "_changes", "_inside", "_outside")

    def __init__(self, scope: ModeScope) -> None:
        self._scope = scope
        self._changes = scope._changes
        self._inside: Mode | None = None
        self._outside: list[Mode] = []

    def __enter__(self) -> None:
        self._scope._check_entry()
        outside = current_mode()
        self._outside.append(outside)
        _mode.set(self._inside or outside.having(outer=outside, owner=self, **self._changes))

    def __exit__(self, *exception: object) -> None:
        inside = current_mode()
        self._inside = None if inside.owner is self else inside
        _mode.set(self._outside.pop())


def _decorate(function: Callable[..., Any], scope: Callable[[], ModeScope]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            inner = function(*args, **kwargs)
            modes = _GeneratorModes(scope())
            step: Callable[[], Any] = inner.__anext__
            try:
                while True:
                    try:
                        with modes:
                            value = await step()
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield value
                        step = functools.partial(inner.asend, sent)
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = functools.partial(inner.athrow, error)
            finally:
                with modes:
                    await inner.aclose()

        return async_generator
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            inner = function(*args, **kwargs)
            modes = _GeneratorModes(scope())
            step: Callable[[], Any] = functools.partial(next, inner)
            try:
                while True:
                    try:
                        with modes:
                            value = step()
                    except StopIteration as stop:
                        return stop.value
                    try:
                        sent = yield value
                        step = functools.partial(inner.send, sent)
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = functools.partial(inner.throw, error)
            finally:
                with modes:
                    inner.close()

        return generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            with scope():
                return await function(*args, **kwargs)

        return coroutine

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return plain


class _GradScope(ModeScope):
    """``no_grad`` and ``enable_grad``: also usable as a bare decorator, ``@no_grad``."""

    _grad: bool

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        scope = super().__new__(cls)
        if function is None:
            return scope
        scope.__init__()  # type: ignore[misc]
        return scope(function)

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__(grad=self._grad, tangents=self._grad)


class no_grad(_GradScope):
    """Operations inside record no graph, and their results have no tangents (`ag.jvp`). Belongs to the asyncio task that entered it.

    ``with no_grad():``, ``@no_grad()`` or ``@no_grad`` on ``def``, ``async def``, generators and async generators. Around the body of a
    generator use the decorator: a ``with`` around a ``yield`` also applies to the consumer's code meanwhile.

    Args:
        function: the function to decorate, in ``@no_grad`` without parentheses; None: the object is a context manager or a decorator.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """

    _grad = False


class enable_grad(_GradScope):
    """Operations inside record again, within `no_grad`.

    Args:
        function: as of `no_grad`.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.no_grad():
    ...     with ag.enable_grad():
    ...         y = x * 2
    >>> y.requires_grad
    True
    """

    _grad = True


class set_grad_enabled(ModeScope):
    """Switch recording on or off: at once when called as a function, until the end of the block when used with ``with``.

    Called at the top level (a line of a script, a REPL, a notebook cell) as a statement of its own it holds for the process, see
    `set_default_dtype`. An object that is given to ``with``, directly or by a variable, never does.

    Args:
        mode: True: record; False: do not.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.set_grad_enabled(False):
    ...     y = x * 2
    >>> y.requires_grad
    False
    """

    def __init__(self, mode: bool) -> None:
        super().__init__(grad=bool(mode), tangents=bool(mode))
        before, everywhere = current_mode(), is_statement() and is_top_level()
        _switch(everywhere, grad=bool(mode), tangents=bool(mode))
        #: the mode after the call and the one before it, which is restored if the object is then used for a block or as a decorator
        self._made, self._of = current_mode(), current_mode() if everywhere else before

    def _undo(self) -> None:
        if current_mode() is self._made:
            _mode.set(self._of)

    def __enter__(self) -> Self:
        self._undo()
        return super().__enter__()

    def __call__(self, function: F) -> F:
        self._undo()
        return super().__call__(function)


def is_grad_enabled() -> bool:
    """True if operations of the running task record a graph.

    Returns:
        True or False.
    """
    return current_mode().grad


class detect_anomaly(ModeScope):
    """Record the forward stack of every operation, name it when its backward fails, and refuse NaN gradients.

    Args:
        check_nan: raise `NaNGradientError` for a NaN in a gradient. Slow in any case: for debugging.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> with ag.detect_anomaly():
    ...     await (x * x).sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """

    def __init__(self, check_nan: bool = True) -> None:
        super().__init__(anomaly=check_nan)


def set_default_dtype(dtype: Any) -> None:
    """Set the dtype that Python floats become.

    At the top level (a line of a script, a REPL, a notebook cell, or a function that such a line calls) it is set for the process: for every task
    and thread that has not set its own. In a task, a thread or a callback it is set for that one and the tasks it starts from now on.

    Args:
        dtype: a real floating dtype.

    Raises:
        ArgumentError: it is not a real floating dtype.
    """
    wanted = np.dtype(dtype)
    if wanted.kind != "f":
        raise ArgumentError(f"set_default_dtype({dtype!r}): expected a real floating dtype such as float32 or float64")
    _switch(is_top_level(), dtype=wanted)


def get_default_dtype() -> np.dtype[Any]:
    """The dtype that Python floats become.

    Returns:
        A dtype: float32 unless `set_default_dtype` was called.
    """
    return current_mode().dtype
