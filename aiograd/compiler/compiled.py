"""`compile`: a function that is recorded once per signature and then run as a program.

Note [When a program is used]
    A call with a known signature runs its program if the captured Tensors have the shapes, dtypes and ``requires_grad`` that they had, and if the
    modules that were called and the function's closure and globals have the same Tensors and plain attributes; else it is recorded again.
    Where operations are watched (anomaly mode, saved-tensor hooks, another recording) the function runs eagerly, with the same bits. Under a
    profiler programs run statement by statement, and nothing is recorded. Inside of `ag.jvp` there are programs of values and tangents
    (`aiograd.compiler.tangent_recording`); inside of other transforms the function runs eagerly.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import FunctionType
from typing import Any, Literal, TypeAlias, TypeVar, overload

from aiograd.compiler.awaiting import RecordedCoroutine
from aiograd.compiler.bound_function import BoundCompiledFunction
from aiograd.compiler.code_kinds import Code, code_of
from aiograd.compiler.compiled_statistics import CompiledStatistics, CompileOptions, Figures, figures_of
from aiograd.compiler.guard_code import arguments_check
from aiograd.compiler.lines import async_block, defined_at, described_line, plain_function
from aiograd.compiler.native.tiers import TIERS, default_tier
from aiograd.compiler.passes.recompute import check_budget
from aiograd.compiler.program import Program
from aiograd.compiler.program_code import MOST_CHECKS
from aiograd.compiler.recorded_results import ResultRecorder
from aiograd.compiler.recording_scope import recording_scope, runs_programs
from aiograd.compiler.results import shape_of
from aiograd.compiler.signature import are_same_arguments, describe, shared_arrays, signature_of, with_tensors
from aiograd.compiler.tangent_recording import TangentRecorder, are_of_levels
from aiograd.compiler.warming import warm_up
from aiograd.compiler.watching.reads import Fit, Read
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.kernels.selection import selected
from aiograd.nn.module import Module
from aiograd.running.caller import warn_caller
from aiograd.running.modes import current_mode
from aiograd.running.trees import leaves_of
from aiograd.tensors.core import TensorCore

F = TypeVar("F", bound=Callable[..., Any])

#: consecutive calls that may change values which they read
MOST_UNSETTLED = 3
#: of how many signatures the arguments are compared without a look into the table
CHECKED = 4

OnBreak: TypeAlias = Literal["raise", "eager"]
Tier: TypeAlias = Literal["auto", "numpy", "native"]
Budget: TypeAlias = float | None


class CompiledFunction:
    """The result of `compile`: called as the function that it was made from.

    Attributes:
        programs: one per signature that has one.
    """

    def __init__(self, function: Callable[..., Any], options: CompileOptions, *, warns: bool = True) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._options = options
        self._on_break = options.on_break
        self._most = options.most_programs
        self._name = getattr(function, "__name__", None) or type(function).__name__
        #: by signature; several where they differ in plain attributes of modules, such as ``training``
        self._codes: dict[Any, tuple[Code, ...]] = {}
        #: functions that know calls by their arguments, each with the code for them; the newest first
        self._checked: tuple[tuple[Callable[..., Any], Code], ...] = ()
        self._breaks: dict[Any, str] = {}
        #: by signature: how many recordings there were one after the other without a run, and the runs before
        self._recent: dict[Any, tuple[int, int]] = {}
        self._recordings = self._eager = 0
        #: of programs that were dropped
        self._past = Figures()
        self._seconds = 0.0
        self._has_warned = self._has_told = not warns
        self._lock = threading.Lock()
        called = (function, getattr(function, "forward", None), inspect.getattr_static(type(function), "__call__", None))
        self._is_async = any(map(inspect.iscoroutinefunction, called))
        if self._is_async and isinstance(function, FunctionType):  # by these `inspect.iscoroutinefunction` knows it
            self.__code__, self.__defaults__, self.__kwdefaults__ = function.__code__, function.__defaults__, function.__kwdefaults__

    def __repr__(self) -> str:
        return f"<compiled {self._name}: {len(self._all())} programs>"

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None or not isinstance(self.function, FunctionType) else BoundCompiledFunction(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _compiled(copy.deepcopy(self.function, memo), self._options)

    def __reduce__(self) -> Any:
        named: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "<unknown>").split("."):
            named = getattr(named, name, None)
        if named is self:
            return self.__qualname__
        return _compiled, (self.function, self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_async:
            return self._call_async(args, kwargs)
        key, code, inputs = self._find(args, kwargs)
        if code is not None:
            return code.run(inputs)
        if key is None:
            args, kwargs = with_tensors(args, kwargs)
            return self.function(*args, **kwargs)
        began = perf_counter()
        try:
            given = args, kwargs
            with self._recorded(inputs, args, kwargs) as (recorder, args, kwargs), recorder.watcher.watching():
                result = self.function(*args, **kwargs)
            return self._keep(key, recorder, inputs, given, result)
        finally:
            self._seconds += perf_counter() - began

    async def _call_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, code, inputs = self._find(args, kwargs)
        if code is not None:
            return await code.run_async(inputs)
        if key is None:
            args, kwargs = with_tensors(args, kwargs)
            return await self.function(*args, **kwargs)
        began = perf_counter()
        try:
            given = args, kwargs
            with self._recorded(inputs, args, kwargs) as (recorder, args, kwargs):
                result = await RecordedCoroutine(self.function(*args, **kwargs), recorder)
            return self._keep(key, recorder, inputs, given, result)
        finally:
            self._seconds += perf_counter() - began

    async def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Prepare a call: record it, compile forward and backward, and make them native, without an effect that remains.

        The function's own code runs once, and a run of the program follows, backward included. Then Tensors, versions, gradients, generators of
        random numbers, running statistics, states of optimizers and schedules, containers and attributes are put back; text that the function
        prints is printed. Nothing else may use them meanwhile. Native functions are made on a thread while the loop runs, of any program but
        those with ``tier="numpy"``; later calls do not wait for them.

        Args:
            *args, **kwargs: of the call; shapes and dtypes count.

        Raises:
            TraceError: the function has no program for this call, or an effect that cannot be put back: on a device, in another library's
                module, at other workers. The errors of the function itself.

        Cancelling it puts everything back; the thread finishes its native functions.

        >>> square = ag.compile(lambda x: (x * x).sum())
        >>> x = ag.ones(3, requires_grad=True)
        >>> await square.warm_up(x)
        >>> square.statistics().recordings, square.statistics().runs, x.grad
        (1, 0, None)
        """
        await warm_up(self, args, kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
        """The key of a call, the code to run, and the Tensors among the arguments.

        Without code there is a key to record the call under, or None to run the function itself.
        """
        mode = current_mode()
        if not mode.plain and (mode.trace is not None or mode.grad) and not runs_programs(mode):
            if mode.trace is None:
                self._eager += 1
            return None, None, []
        for check, code in self._checked:
            found = check(args, kwargs, mode)
            if found is not None and (code.check() or code.fit() is Fit.SAME):
                if not code.checks_of_arguments:  # another one is to be made
                    with self._lock:
                        self._checked = tuple([entry for entry in self._checked if entry[1] is not code])
                return None, code, found
        inputs: list[Any] = []
        key = (signature_of(args, kwargs, inputs), mode.grad, mode.dtype, selected(), shared_arrays(inputs))
        for code in self._codes.get(key, ()):
            fit = code.fit()
            if fit is Fit.SAME and code.takes(inputs):
                if code.checks_of_arguments < MOST_CHECKS:  # making one takes longer than the comparison
                    self._add_check(code, arguments_check(args, kwargs, inputs, mode, code))
                return key, code, inputs
            if fit is Fit.STALE:
                with self._lock:
                    self._forget(key, code)
        if mode.profiler is not None or key in self._breaks or (not mode.tangents and are_of_levels(inputs)):
            self._eager += 1
            return None, None, inputs
        return key, None, inputs

    def _add_check(self, code: Code, check: Callable[..., Any] | None) -> None:
        """Put a check for calls like this one first, see `aiograd.compiler.guard_code`."""
        with self._lock:
            code.checks_of_arguments += 1
            if check is not None:
                self._checked = ((check, code), *self._checked[: CHECKED - 1])

    # ---------------------------------------------------------------- recording

    @contextlib.contextmanager
    def _recorded(
        self, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: Callable[..., ResultRecorder] | None = None
    ) -> Iterator[tuple[ResultRecorder, tuple[Any, ...], dict[str, Any]]]:
        """Context of a recorded call: the recorder, made by `kind` where that is given, and the arguments to call the function with."""
        kind = kind or (TangentRecorder if are_of_levels(inputs) else ResultRecorder)
        tensors = {id(tensor) for tensor in leaves_of((args, kwargs), TensorCore)}
        arrays = [tensor for tensor in inputs if id(tensor) not in tensors]
        args, kwargs = with_tensors(args, kwargs, inputs)
        self._recordings += 1
        recorder = kind(inputs, arrays, raises=self._on_break == "raise")
        recorder.watcher.begins(self.function, args, kwargs)
        if self._is_async:
            self._refuse_async_blocks(recorder)
        with recording_scope(recorder, self._name):
            yield recorder, args, kwargs

    def _refuse_async_blocks(self, recorder: ResultRecorder) -> None:
        plain = plain_function(self.function)
        line = None if plain is None else async_block(plain.__code__)
        if plain is not None and line is not None:
            recorder.waits(*described_line(plain.__code__.co_filename, line, plain.__globals__))

    def _keep(self, key: Any, recorder: ResultRecorder, inputs: list[Any], given: Any, result: Any) -> Any:
        """Make a program of a recorded call, and return the call's result.

        Args:
            key: the key that calls find the program by.
            recorder: the recorder of the call.
            inputs: the Tensors among the arguments.
            given: the arguments, positional and by name.
            result: the function's result.
        """
        if recorder.broken is None and not are_same_arguments(key[0], inputs, *given):
            recorder.breaks("it changes a list or dict among its arguments")
        outputs: list[Any] = []
        rebuild = shape_of(result, outputs, self.function, self._name, needs_outputs=not recorder.has_called)
        text = describe(key[0])
        reads, moved = recorder.settle()
        program = recorder.program(text, outputs)
        recorder.reads.tensors.clear()  # trace functions refer to themselves and to the reads: the Tensors would live until they are collected
        with self._lock:
            if program is not None and not self._settles(key, recorder, moved):
                return result
            if program is None or recorder.broken is not None:
                self._breaks[key] = str(recorder.broken)
                if not self._has_told and not are_of_levels(inputs):
                    self._has_told = True
                    warn_caller(
                        f"the compiled function {self._name} runs eagerly for {text or 'no arguments'}: {recorder.broken}. See "
                        f"{self._name}.statistics().reasons for other signatures; this is said once."
                    )
                return result
            code = code_of(self._name, program, recorder, rebuild, reads, inputs, self._options, self._is_async)
            self._codes[key] = (*self._codes.get(key, ()), code)
            if sum(map(len, self._codes.values())) > self._most:
                self._drop_one(code)
        return result

    def _settles(self, key: Any, recorder: ResultRecorder, moved: Read | None) -> bool:
        """False if the call has changed values that it reads, as a first call that makes something lazily does: the next call is recorded.

        A function that does so every time, or of which something else changes before every call, runs eagerly from then on.
        """
        runs = self._past.runs + sum([code.runs for code in self._all()])
        recordings, runs_before = self._recent.get(key, (0, runs))
        recordings = recordings + 1 if runs == runs_before else 1
        self._recent[key] = recordings, runs
        if moved is not None and recordings >= MOST_UNSETTLED:
            recorder.breaks(f"it changes what it reads, {moved}")
        elif recordings > self._options.max_signatures:
            recorder.breaks("what it reads changes before every call")
        return moved is None or recorder.broken is not None

    def _forget(self, key: Any, code: Code) -> None:
        left = tuple([each for each in self._codes.get(key, ()) if each is not code])
        self._checked = tuple([entry for entry in self._checked if entry[1] is not code])
        if len(left) < len(self._codes.get(key, ())):
            self._past += figures_of(code)
        if left:
            self._codes[key] = left
        else:
            self._codes.pop(key, None)

    def _drop_one(self, new: Code) -> None:
        key, oldest = min(((key, code) for key, codes in self._codes.items() for code in codes), key=lambda entry: entry[1].used)
        self._forget(key, oldest)
        if not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"the compiled function {self._name} was called with more than {self._most} signatures (max_signatures); the least used program was "
                f"dropped. The last two: {oldest.program.signature}; {new.program.signature}. Pad to fewer shapes, or pass numbers as Tensors."
            )

    # ---------------------------------------------------------------- looking at it

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs, in the order in which they were recorded."""
        return tuple(code.program for code in self._all())

    def statistics(self) -> CompiledStatistics:
        """Figures of recordings and runs so far."""
        codes = self._all()
        figures = sum(map(figures_of, codes), self._past)
        return CompiledStatistics(
            signatures=len(codes),
            recordings=self._recordings,
            runs=figures.runs,
            eager=self._eager,
            breaks=len(self._breaks),
            reasons={describe(key[0]): reason for key, reason in self._breaks.items()},
            recording_seconds=self._seconds,
            arena_bytes=sum(code.held_bytes for code in codes),
            native_runs=figures.native_runs,
            native_programs=sum(code.program.tier == "native" for code in codes),
            compile_seconds=figures.compile_seconds,
            cache_hits=figures.cache_hits,
        )

    def _all(self) -> list[Code]:
        return [code for codes in list(self._codes.values()) for code in codes]

    def clear(self) -> None:
        """Forget all programs; the next call is recorded."""
        with self._lock:
            self._past = sum(map(figures_of, self._all()), self._past)
            self._codes.clear()
            self._checked = ()
            self._breaks.clear()
            self._recent.clear()
            self._has_warned = self._has_told = False


def _compiled(function: Any, options: CompileOptions) -> Any:
    return (CompiledModule if isinstance(function, Module) else CompiledFunction)(function, options)


class CompiledModule(CompiledFunction):
    """A compiled `nn.Module` that passes for the module: every attribute that a compiled function lacks is read from and set on the module."""

    function: Any
    _is_made = False

    def __init__(self, function: Any, options: CompileOptions) -> None:
        super().__init__(function, options)
        self._is_made = True

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.function)

    def __getattr__(self, name: str) -> Any:
        if name == "function":
            raise AttributeError(name)
        return getattr(self.function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made and name not in self.__dict__:
            setattr(self.function, name, value)
        else:
            object.__setattr__(self, name, value)

    def __bool__(self) -> bool:
        return bool(self.function)

    def __len__(self) -> int:
        return len(self.function)

    def __getitem__(self, index: Any) -> Any:
        return self.function[index]

    def __iter__(self) -> Iterator[Any]:
        modules: Iterator[Any] = iter(self.function)
        return modules


@overload
def compile(
    function: F, *, on_break: OnBreak = ..., max_signatures: int = ..., tier: Tier | None = ..., dynamic: bool = ..., memory_budget: Budget = ...
) -> Any: ...
@overload
def compile(
    *, on_break: OnBreak = ..., max_signatures: int = ..., tier: Tier | None = ..., dynamic: bool = ..., memory_budget: Budget = ...
) -> Callable[[F], Any]: ...
def compile(
    function: Any = None, *, on_break: OnBreak = "raise", max_signatures: int = 16, tier: Tier | None = None, dynamic: bool = False,
    memory_budget: Budget = None,
) -> Any:
    """A function that records the operations of its first call with a signature, and from then on runs them as one program.

    Results and gradients have the bits of the eager function. Backward is one node of the graph, awaited as any other. Python side effects happen
    while recording only.

    An ``async def`` may be a whole training step: ``zero_grad()``, forward, ``await loss.backward()``, clipping, ``optimizer.step()``, a schedule's
    step. Options of optimizers are read at every run. It may await passes and steps of its own, nothing else. A run that fails or is cancelled
    leaves behind the same as the eager function.

    Args:
        function: a ``def``, a method or a `nn.Module`; without it, a decorator is returned.
        on_break: for a function that reads values of tensors (``if loss > 1``, ``item()``): "raise" raises `TraceError` at that line; "eager" runs
            such signatures eagerly from then on, and says so once with a warning, as for anything else that a program cannot repeat.
        max_signatures: programs that are kept; beyond it the least used is dropped, with one warning.
        tier: "numpy": programs are calls of numpy; "native": machine code from the first run on, as far as they can be; "auto": machine code once
            they have run often. The bits are the same. Where there is no machine code, as without llvmlite, all are calls of numpy
            (`ag.kernels.native_problem` has the reason). By default as ``AIOGRAD_COMPILE_TIER`` says, else "auto".
        dynamic: True for arguments of many sizes, as in a service that puts requests together: each size has a program of its own, 64 times as
            many are kept, and programs that differ in sizes alone share their machine code.
        memory_budget: share of the memory for the backward that programs may hold; they compute the rest again (`Program.memory_plan`). None: all.

    Returns:
        A `CompiledFunction`. A compiled module passes for the module: it has its parameters, state and attributes, and may be a part of another
        module.

    Raises:
        ArgumentTypeError: not a function, or a generator function. ArgumentError: another `on_break`, fewer than one signature, or a budget outside
        (0, 1]. When called: TraceError, ArgumentTypeError, and the errors of the function itself; ArgumentError if no program within the memory
        budget is found, with the smallest budget that has one.
    """
    if on_break not in ("raise", "eager"):
        raise ArgumentError(f"compile(on_break={on_break!r}): expected 'raise' or 'eager'")
    if max_signatures.__class__ is not int or max_signatures < 1:
        raise ArgumentError(f"compile(max_signatures={max_signatures!r}): expected an int of at least 1")
    if tier not in (None, *TIERS):
        raise ArgumentError(f"compile(tier={tier!r}): expected one of {', '.join(TIERS)}")
    if memory_budget is not None:
        check_budget(memory_budget, "compile(memory_budget=")
    if function is None:
        return functools.partial(compile, on_break=on_break, max_signatures=max_signatures, tier=tier, dynamic=dynamic, memory_budget=memory_budget)
    if isinstance(function, type) or not callable(function):
        found = f"the class {function.__name__}; compile an object of it" if isinstance(function, type) else type(function).__name__
        raise ArgumentTypeError(f"compile(): expected a function or module, found {found}")
    plain = plain_function(function)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        name = getattr(function, "__name__", function)
        raise ArgumentTypeError(f"{defined_at(function)}: compile(): {name} is a generator function; expected one that returns its result")
    return _compiled(function, CompileOptions(on_break, max_signatures, tier or default_tier(), dynamic, memory_budget))
