"""`compile`: a function that is recorded once per signature and then run as a program.

Note [When a program is used]
    A call with a known signature runs its program if the captured Tensors have the shapes, dtypes and ``requires_grad`` that they had, and if the
    modules that were called and the function's closure and globals have the same Tensors and plain attributes; else it is recorded again.
    Where operations are watched (anomaly mode, saved-tensor hooks, a profiler, another recording) the function runs eagerly, with the same bits.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from aiograd.caller import warn_caller
from aiograd.compiler.forward_code import compile_forward, saved_names, sources
from aiograd.compiler.node import ProgramNode, estimate, output_counters
from aiograd.compiler.program import Program
from aiograd.compiler.recording import Fit, ProgramRecorder, fit_of
from aiograd.compiler.signature import describe, shared_arrays, signature_of, with_tensors
from aiograd.compiler.surroundings import Guard, guards_of
from aiograd.errors import ArgumentError, ArgumentTypeError, TraceError
from aiograd.graph.node import InputMetadata
from aiograd.kernels.selection import selected
from aiograd.modes import Mode, ModeScope, current_mode
from aiograd.tensors.core import TENSOR_CLASS, TensorCore, refresh
from aiograd.trees import map_tree

F = TypeVar("F", bound=Callable[..., Any])

_uses = itertools.count(1)


@dataclass(frozen=True)
class CompiledStatistics:
    """Figures of a compiled function.

    Attributes:
        signatures: that it has programs for.
        recordings: calls that were recorded.
        runs: calls that ran a program.
        eager: calls that ran the function itself and were not recorded.
        breaks: signatures that have no program and run eagerly.
        reasons: why, by their text.
        arena_bytes: bytes that one run of every program computes.
    """

    signatures: int
    recordings: int
    runs: int
    eager: int
    breaks: int
    reasons: dict[str, str]
    arena_bytes: int


class ProgramCode:
    """A program with its code and all that its calls share.

    Args:
        name: of the function.
        program: its data.
        result: rebuilds what the function returns from its outputs.
        guards: objects whose attributes have to be what they were.
    """

    def __init__(self, name: str, program: Program, result: Callable[[list[Any]], Any], guards: list[Guard]) -> None:
        self.name = name
        self.program = program
        self.result = result
        self.guards = guards
        self.forward, program.source = compile_forward(program)
        self.sources, counts = sources(program)
        self.has_repeats = max(counts, default=0) > 1
        self.all_needed = (True,) * len(self.sources)
        self.backwards: dict[Any, Callable[..., list[Any]]] = {}
        self.metadata = tuple([InputMetadata(value.shape, value.dtype, "cpu") for value in program.outputs])
        self.records = bool(self.sources)
        saved = set(saved_names(program))
        #: inputs and captured Tensors, and outputs, whose values are saved
        self.saved_places = [i for i, value in enumerate((*program.inputs, *program.captured)) if value.name in saved]
        self.saved_outputs = [i for i, value in enumerate(program.outputs) if value.name in saved]
        self.estimate = estimate(program)
        self.captured = [
            (tensor, value.shape, value.strides, value.dtype, value.records) for tensor, value in zip(program.tensors, program.captured, strict=True)
        ]
        self.used = 0
        self.runs = 0

    def fit(self) -> Fit:
        """How what the program was made for compares with what is now."""
        for tensor, shape, strides, dtype, records in self.captured:
            if tensor._x is not None:
                refresh(tensor)
            data = tensor._data
            if data.shape != shape or data.strides != strides or data.dtype != dtype or (tensor._node is not None) is not records:
                return Fit.STALE
        found = Fit.SAME
        for owner, attributes in self.guards:
            fit = fit_of(owner, attributes)
            if fit is Fit.STALE:
                return fit
            if fit is Fit.OTHER:
                found = fit
        return found

    def add_backward(self, key: Any, backward: Callable[..., list[Any]], text: str) -> None:
        """Keep the code of another kind of pass."""
        if key not in self.backwards:
            self.backwards[key] = backward
            self.program.source += f"\n\n{text}"

    def run(self, inputs: list[Any]) -> Any:
        """One call."""
        self.used = next(_uses)
        self.runs += 1
        tensors = [*inputs, *self.program.tensors]
        try:
            arrays, saved = self.forward(*[tensor._data for tensor in tensors])
        except Exception as error:
            self._explain(error)
            raise
        outputs: list[Any] = []
        cls = TENSOR_CLASS[0]
        for array in arrays:
            tensor = cls()
            tensor._data = array
            tensor._node = tensor._vc = tensor._x = None
            tensor._nr = 0
            outputs.append(tensor)
        if self.records:
            node = ProgramNode(self, tensors, saved)
            for number, (tensor, value) in enumerate(zip(outputs, self.program.outputs, strict=True)):
                if value.records:
                    tensor._node, tensor._nr = node, number
            if self.saved_outputs:
                node.counters = output_counters(outputs, self.saved_outputs)
        return self.result(outputs)

    def _explain(self, error: Exception) -> None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self.forward.__code__:
            trace = trace.tb_next
        if trace is not None:
            line = self.program.source.splitlines()[trace.tb_lineno - 1].strip()
            error.add_note(f"in the compiled function {self.name}, statement `{line}`")


class CompiledFunction:
    """The result of `compile`: called as the function that it was made from.

    Attributes:
        programs: one per signature that has one.
    """

    def __init__(self, function: Callable[..., Any], on_break: str, max_signatures: int) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._on_break = on_break
        self._most = max_signatures
        self._name = getattr(function, "__name__", None) or type(function).__name__
        #: by signature; several where they differ in plain attributes of modules, such as ``training``
        self._codes: dict[Any, tuple[ProgramCode, ...]] = {}
        self._breaks: dict[Any, str] = {}
        self._recordings = self._eager = self._past_runs = 0
        self._has_warned = self._has_told = False
        self._lock = threading.Lock()
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "forward", None))

    def __repr__(self) -> str:
        return f"<compiled {self._name}: {len(self._all())} programs>"

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = current_mode()
        if not (mode.plain or not (mode.grad or mode.watched)) or self._is_async:
            if mode.trace is None:
                self._eager += 1
            return self.function(*args, **kwargs)
        inputs: list[Any] = []
        key = (signature_of(args, kwargs, inputs), mode.grad, mode.dtype, selected(), shared_arrays(inputs))
        for code in self._codes.get(key, ()):
            fit = code.fit()
            if fit is Fit.SAME:
                return code.run(inputs)
            if fit is Fit.STALE:
                with self._lock:
                    self._forget(key, code)
        if key in self._breaks:
            self._eager += 1
            return self.function(*args, **kwargs)
        return self._record(key, mode, args, kwargs, inputs)

    # ---------------------------------------------------------------- recording

    def _record(self, key: Any, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]) -> Any:
        args, kwargs = with_tensors(args, kwargs, inputs)
        recorder = ProgramRecorder(inputs, raises=self._on_break == "raise")
        guards = guards_of(self.function, args)
        self._recordings += 1
        with ModeScope(trace=recorder):
            result = self.function(*args, **kwargs)
        outputs: list[Any] = []
        rebuild = self._shape_of(result, outputs)
        text = describe(key[0])
        program = recorder.program(text, outputs)
        if program is not None and any(fit_of(owner, attributes) is not Fit.SAME for owner, attributes in guards):
            recorder.breaks("it changes a variable of its closure or an attribute of its object")
            program = None
        with self._lock:
            if program is None:
                self._breaks[key] = str(recorder.broken)
                if not self._has_told:
                    self._has_told = True
                    warn_caller(
                        f"the compiled function {self._name} runs eagerly for {text or 'no arguments'}: {recorder.broken}. See "
                        f"{self._name}.statistics().reasons for other signatures; this is said once."
                    )
                return result
            code = ProgramCode(self._name, program, rebuild, _distinct([*guards, *recorder.modules.values()]))
            code.used = next(_uses)
            self._codes[key] = (*self._codes.get(key, ()), code)
            if sum(map(len, self._codes.values())) > self._most:
                self._drop_one(code)
        return result

    def _shape_of(self, result: Any, outputs: list[Any]) -> Callable[[list[Any]], Any]:
        """Collects the Tensors of a result; returns a function that makes a result of others."""
        if isinstance(result, TensorCore):
            outputs.append(result)
            return _only

        def collect(value: Any) -> None:
            if isinstance(value, TensorCore):
                outputs.append(value)
            elif isinstance(value, (tuple, list, dict)):
                for item in value.values() if isinstance(value, dict) else value:
                    collect(item)
            elif value is not None:
                raise TraceError(
                    f"the compiled function {self._name} returned a {type(value).__name__}; expected a Tensor, or nested tuples, lists and dicts of "
                    "Tensors, since nothing else is computed anew by a program"
                )

        collect(result)
        if not outputs:
            raise TraceError(f"the compiled function {self._name} returned no Tensor: a program would have nothing to compute")

        return functools.partial(_filled, map_tree(lambda tensor: _Place(), result, TensorCore))

    def _forget(self, key: Any, code: ProgramCode) -> None:
        left = tuple([each for each in self._codes.get(key, ()) if each is not code])
        if len(left) < len(self._codes.get(key, ())):
            self._past_runs += code.runs
        if left:
            self._codes[key] = left
        else:
            self._codes.pop(key, None)

    def _drop_one(self, new: ProgramCode) -> None:
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
        return CompiledStatistics(
            signatures=len(codes),
            recordings=self._recordings,
            runs=self._past_runs + sum(code.runs for code in codes),
            eager=self._eager,
            breaks=len(self._breaks),
            reasons={describe(key[0]): reason for key, reason in self._breaks.items()},
            arena_bytes=sum(code.program.arena_bytes for code in codes),
        )

    def _all(self) -> list[ProgramCode]:
        return [code for codes in list(self._codes.values()) for code in codes]

    def clear(self) -> None:
        """Forget all programs; the next call is recorded."""
        with self._lock:
            self._past_runs += sum(code.runs for code in self._all())
            self._codes.clear()
            self._breaks.clear()
            self._has_warned = self._has_told = False


def _distinct(guards: list[Guard]) -> list[Guard]:
    return list({id(owner): (owner, attributes) for owner, attributes in guards}.values())


class _Place:
    """Stands for a Tensor in the structure of a result."""

    __slots__ = ()


def _only(outputs: list[Any]) -> Any:
    return outputs[0]


def _filled(structure: Any, outputs: list[Any]) -> Any:
    left = iter(outputs)
    return map_tree(lambda place: next(left), structure, _Place)


@overload
def compile(function: F, *, on_break: Literal["raise", "eager"] = ..., max_signatures: int = ...) -> Any: ...
@overload
def compile(function: None = None, *, on_break: Literal["raise", "eager"] = ..., max_signatures: int = ...) -> Callable[[F], Any]: ...
def compile(function: Any = None, *, on_break: Literal["raise", "eager"] = "raise", max_signatures: int = 16) -> Any:
    """A function that records the operations of its first call with a signature, and from then on runs them as one program.

    Results and gradients have the bits of the eager function. Backward is one node of the graph, awaited as any other. Python side effects happen
    while recording only. An ``async def`` runs eagerly every time; what it calls may be compiled.

    Args:
        function: a ``def``, a method or a `nn.Module`; without it, a decorator is returned.
        on_break: for a function that reads values of tensors (``if loss > 1``, ``item()``): "raise" raises `TraceError` at that line; "eager" runs
            such signatures eagerly from then on, and says so once with a warning, as for anything else that a program cannot repeat.
        max_signatures: programs that are kept; beyond it the least used is dropped, with one warning.

    Returns:
        A `CompiledFunction`.

    Raises:
        ArgumentTypeError: not a function, or a generator function. ArgumentError: another `on_break`, or fewer than one signature. When called:
        TraceError, ArgumentTypeError, and what the function raises.
    """
    if on_break not in ("raise", "eager"):
        raise ArgumentError(f"compile(on_break={on_break!r}): expected 'raise' or 'eager'")
    if max_signatures.__class__ is not int or max_signatures < 1:
        raise ArgumentError(f"compile(max_signatures={max_signatures!r}): expected an int of at least 1")
    if function is None:
        return functools.partial(compile, on_break=on_break, max_signatures=max_signatures)
    if not callable(function):
        raise ArgumentTypeError(f"compile(): expected a function or module, found {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ArgumentTypeError(f"compile(): {getattr(function, '__name__', function)} is a generator function; expected one that returns its result")
    return CompiledFunction(function, on_break, max_signatures)
