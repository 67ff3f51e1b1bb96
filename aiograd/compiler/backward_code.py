"""The backward of a program as `ArrayCode`, made while the first pass runs it.

The first pass that has gradients for certain outputs and wants certain edges goes through the rules one by one, on recording arrays that have the
real ones behind them, and writes down their work: the numpy calls that a rule makes, or the rule itself as one call; which rule gave None, which
gradient had to be summed down to its target's shape or cast, which was a slice. Later passes run the code. Sums are associated as the engine does
(Note [Deterministic sums] in `aiograd.engine.input_buffer`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Form, Memory, Ref
from aiograd.compiler.effects import drawn_again
from aiograd.compiler.forward_code import is_needed, names_of, residual, rule_inputs, saved_names, sources, uses
from aiograd.compiler.passes import BUDGET_PASSES, optimized
from aiograd.compiler.passes.dead import without_dead_code
from aiograd.compiler.program import Program, Statement, Value, ValueKind
from aiograd.compiler.reached import statements_run
from aiograd.compiler.source import load
from aiograd.compiler.tracing import Recorded, Tracer, Untraceable
from aiograd.engine.validate import fit
from aiograd.ops.elementwise import identity
from aiograd.ops.indexing import getitem_adjoint
from aiograd.ops.slice_gradient import SliceGradient, UnsummedGradient
from aiograd.running.trees import leaves_of, map_tree

_NOTHING: Any = ((), ())
_ARRAYS = (np.ndarray, np.generic)


class BackwardWriter:
    """Runs one pass through a program and writes its code.

    Args:
        program: the program of the forward.
        node: the node of the call, for errors.
        saved: arrays that the forward kept, by `saved_names`; a list is emptied.
        grads: one per output; None for one that got none.
        needs: per edge, True if its gradient is wanted.
        sums: per edge, True if the gradients of several uses are added up here.
    """

    def __init__(
        self, program: Program, node: Any, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], sums: Sequence[bool]
    ) -> None:
        self._program = program
        self._on_device = program.device != "cpu"
        self._node = node
        self._tracer = Tracer("d", program.numbers)
        #: arrays that the forward kept, by name
        self._saved = {name: self._tracer.recorded(name, value) for name, value in zip(saved_names(program), saved, strict=True)}
        if isinstance(saved, list):  # within a memory budget: from here on they are dropped one by one
            saved.clear()
        given = [self._tracer.recorded(f"g_{value.name}", grad) for value, grad in zip(program.outputs, grads, strict=True)]
        self._parameters = ("saved", tuple(_refs(self._saved.values()))), ("grads", tuple(_refs(given)))
        #: by name of a value, its gradient; the names of gradients that are sums made here
        self._sums: dict[str, Any] = {
            value.name: each for value, each, grad in zip(program.outputs, given, grads, strict=True) if grad is not None
        }
        self._owned: set[str] = set()
        places, counts = sources(program)
        numbers = {place: k for k, place in enumerate(places)}
        #: by statement and argument, the edge of a use
        self._edges = {(number, i): numbers[place] for number, i, place in uses(program)}
        self._wanted = self._lead_to(needs)
        #: per edge: True if its several uses are added up here; the gradients of its uses, if not; the name of its target
        self._is_summed = [bool(is_sum) and count > 1 for is_sum, count in zip(sums, counts, strict=True)]
        self._parts: list[list[Any]] = [[] for _ in places]
        self._targets = [(*program.inputs, *program.captured)[place].name for place in places]
        self._results: list[Any] = []
        #: within a memory budget, by statement the values to compute again before it, and the names to drop after it
        self._plan: dict[int, Any] = {}
        if program.recomputation is not None:
            present = [grad is not None for grad in grads]
            self._plan = program.recomputation.of_pass(statements_run(program, present, needs))

    def run(self) -> list[Any]:
        """The gradients of the edges."""
        statements = self._program.statements
        with self._tracer.watching(np.geterr()):
            for number in reversed(range(len(statements))):
                if statements[number].node is not None:
                    again, gone = self._plan.get(number, _NOTHING)
                    for each in again:
                        self._compute_again(each, statements[each])
                        for name in self._program.recomputation.dropped.get(each, ()):
                            del self._saved[name]
                    self._statement(number, statements[number])
                    for name in gone:
                        self._saved.pop(name, None)
        self._results = [self._result(k) for k in range(len(self._targets))]
        return [None if each is None else each.value for each in self._results]

    def _result(self, edge: int) -> Any:
        """The gradient of an edge."""
        parts = self._parts[edge]
        if self._is_summed[edge]:
            return self._sums.get(self._targets[edge])
        if not parts:
            return None
        parts = [self._opaque("slice_gradient", SliceGradient, _parts_of(part)) if part.__class__ is SliceGradient else part for part in parts]
        return self._opaque("unsummed", UnsummedGradient, (parts,)) if len(parts) > 1 else parts[0]

    def compiled(self) -> tuple[ArrayCode, Callable[..., list[Any]], set[str]]:
        """The code of the backward, before any pass; its function; names of the saved values that its results may share memory with."""
        results = map_tree(_ref_of, self._results, Recorded)
        plain = code = ArrayCode("backward", self._parameters, tuple(self._tracer.calls), results)
        if self._program.recomputation is not None:
            code = replace(optimized(code, BUDGET_PASSES), frees=True)
        else:
            code = without_dead_code(code) if self._on_device else optimized(code)
        shared = Memory(code).shared(self._parameters[0][1], leaves_of(code.results, Ref))
        return plain, load(code, self._program.file), {ref.name for ref in shared}

    # ---------------------------------------------------------------- which part

    def _lead_to(self, needs: Sequence[bool]) -> set[tuple[int, int]]:
        """The arguments (by statement and position) that lead to an edge with a wanted gradient."""
        made: set[str] = set()
        found: set[tuple[int, int]] = set()
        for number, statement in enumerate(self._program.statements):
            if statement.node is None:
                continue
            for i, value in enumerate(statement.arrays):
                if value is None or not is_needed(statement, i):
                    continue
                if value.name in made if value.kind is ValueKind.COMPUTED else needs[self._edges[number, i]]:
                    found.add((number, i))
                    made.update(output.name for output in statement.outputs)
        return found

    # ---------------------------------------------------------------- one statement

    def _statement(self, number: int, statement: Statement) -> None:
        wanted = [i for i in range(len(statement.arrays)) if (number, i) in self._wanted]
        found = [self._sums.pop(value.name, None) for value in statement.outputs]
        self._owned.difference_update([value.name for value in statement.outputs])  # a rule may hand it on as it is
        if not wanted or all(grad is None for grad in found):
            return
        cls: Any = statement.node
        op = statement.op
        conjugates = bool(getattr(cls, "conjugates", False))
        self._tracer.comment = f"{op.name}, {statement.place}: {statement.line}"
        if op.outputs == 1:
            g: Any = self._conjugated(found[0]) if conjugates else found[0]
        else:
            g = tuple(
                [
                    self._zeros(value, found) if grad is None else self._conjugated(grad) if conjugates else grad
                    for grad, value in zip(found, statement.outputs, strict=True)
                ]
            )
        arrays = (op.variadic,) if op.variadic else op.arrays
        targets = {arrays[0]} if op.variadic else {op.arrays[i] for i in wanted}
        results: dict[str, Any] = {}
        inputs = rule_inputs(statement)
        for arguments, rule, rule_names in cls.row.fast:
            if not targets & set(arguments):
                continue
            if rule is identity:
                results[arguments[0]] = g
                continue
            needs = tuple(argument in targets for argument in arguments)
            given = [g, *[self._rule_argument(number, statement, name, needs, inputs) for name in rule_names]]
            if op.name == "setitem" and arguments == ("value",) and leaves_of(statement.statics, Value):
                target: Any = statement.arrays[1]  # the number of elements that a mask selects is another in each run
                results["value"] = self._opaque("setitem_value", partial(_fitted, rule, target), tuple(given))
                continue
            result = self._call(f"{op.name}_{'_'.join(arguments)}", rule, tuple(given), wants_several=op.variadic is not None or len(arguments) > 1)
            if op.variadic:
                results.update((str(i), part) for i, part in enumerate(result))
            else:
                results.update(zip(arguments, (result,) if len(arguments) == 1 else result, strict=True))
        for i in wanted:
            grad = results.get(str(i) if op.variadic else op.arrays[i])
            if grad is not None:
                self._give(number, i, statement, grad, conjugates)

    def _compute_again(self, number: int, statement: Statement) -> None:
        """Compute a statement of the forward again; floating point errors were told the first time."""
        op, fused, tracer = statement.op, statement.fused, self._tracer
        names = [value.name for value in statement.outputs]
        arrays = tuple([None if value is None else self._saved[value.name] for value in statement.arrays])
        options = map_tree(lambda value: self._saved[value.name], statement.statics, Value) if statement.statics else {}
        function, is_one = statement.forward, fused is None and op.outputs == 1
        if fused is not None and not statement.is_row:
            function, arrays, is_one = partial(drawn_again, op.forward), (self._saved[residual(number, *fused.residuals)],), True
        elif fused is not None:
            names += [residual(number, each) for each in fused.residuals]
            function = fused.forward if op.outputs == 1 else _Flat(fused.forward)
        tracer.comment = f"again, {statement.place}: {statement.line}"
        before = len(tracer.calls)
        with np.errstate(all="ignore"):
            try:
                found = tracer.trace(function, arrays, options)
                parts = (found,) if is_one else tuple(found)
                if not all([type(part) is Recorded for part in parts]) or len(parts) != len(names):
                    raise Untraceable("a result that is no array")
            except Untraceable:
                del tracer.calls[before:]
                result = function(*map_tree(_value_of, arrays, Recorded), **map_tree(_value_of, options, Recorded))
                found = tracer.add(Form.CALL, function, op.name, arrays, options, result, opaque=True)
                parts = (found,) if is_one else tuple(found)
            for name, part, value in zip_longest(names, parts, statement.outputs):
                self._saved[name] = tracer.as_array(part) if value is not None and value.shape == () else part
                self._saved[name].made = False
        for call in tracer.calls[before:]:
            call.pure = False  # the same call at another place is another array

    def _call(self, label: str, function: Callable[..., Any], arguments: tuple[Any, ...], *, wants_several: bool = False) -> Any:
        """Note the calls that a function makes; if they cannot be traced, the function itself as one call."""
        try:
            if not all([type(each) is not Recorded or isinstance(each.value, _ARRAYS) for each in arguments]):
                raise Untraceable("a saved value that is no array")
            result = self._tracer.trace(function, arguments)
        except Untraceable:
            return self._opaque(label, function, arguments)
        parts = result if wants_several else (result,)
        if all(part is None or type(part) in (Recorded, SliceGradient) for part in parts):
            return result
        return self._opaque(label, function, arguments)

    def _opaque(self, label: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function and note it as one call."""
        result = function(*map_tree(_value_of, arguments, Recorded))
        return self._tracer.add(Form.CALL, function, label, arguments, {}, result, fresh=self._on_device or function is np.zeros, opaque=True)

    def _zeros(self, value: Value, grads: Sequence[Any]) -> Any:
        """The gradient of an output that got none."""
        if value.device == "cpu":
            return self._opaque("zeros", np.zeros, (value.shape, value.dtype))
        present = next(grad for grad in grads if grad is not None)
        return self._opaque("zeros_like", _zeros_like, (present, value.shape, value.dtype))

    def _rule_argument(self, number: int, statement: Statement, name: str, needs: tuple[bool, ...], inputs: tuple[str, ...]) -> Any:
        op = statement.op
        if name == "needs":
            return needs
        if name in inputs:
            if name in statement.statics:
                return map_tree(lambda value: self._saved[value.name], statement.statics[name], Value)
            found = [self._saved[each] for each in names_of(statement, number, name)]
            if name == op.variadic or (name == "out" and op.outputs != 1):
                return tuple(found)
            return found[0] if found else None
        if name in statement.statics:
            return statement.statics[name]
        if name in op.defaults and name in op.statics:
            return op.defaults[name]
        base, _, suffix = name.rpartition("_")
        if base == op.variadic:
            return tuple([getattr(value, suffix) for value in statement.arrays])
        value = statement.arrays[op.arrays.index(base)]
        return None if value is None else getattr(value, suffix)

    # ---------------------------------------------------------------- gradients on their way

    def _give(self, number: int, i: int, statement: Statement, grad: Any, conjugates: bool) -> None:
        """Fit a gradient to its target, and send or add it."""
        target: Any = statement.arrays[i]
        if conjugates:
            grad = self._conjugated(grad)
        if grad.shape != target.shape or grad.dtype is not target.dtype:
            grad = self._call("fit", fit, (self._dense(grad), target.shape, target.dtype, _NODE, i))
        edge = self._edges.get((number, i)) if target.kind is not ValueKind.COMPUTED else None
        if edge is not None and not self._is_summed[edge]:
            self._parts[edge].append(grad)
            return
        name = target.name if edge is None else self._targets[edge]
        have: Any = self._sums.get(name)
        if have is None:
            self._sums[name] = self._dense(grad)
            if grad.__class__ is SliceGradient:
                self._owned.add(name)
        elif name in self._owned and isinstance(have.value, np.ndarray) and grad.__class__ is SliceGradient:
            self._tracer.write(_add_slice, "add_slice", (have, *_parts_of(grad)), have)
        elif name in self._owned and isinstance(have.value, np.ndarray) and _is_laid_out_as_sum(have.value, grad.value):
            self._tracer.write(np.add, "add", (have, grad), have)
        else:
            self._sums[name] = self._call("plus", operator.add, (have, self._dense(grad)))
            self._owned.add(name)

    def _conjugated(self, grad: Any) -> Any:
        return self._call("conjugate", np.conjugate, (grad,))

    def _dense(self, grad: Any) -> Any:
        if grad.__class__ is not SliceGradient:
            return grad
        return self._tracer.row(getitem_adjoint, (grad.value,), {"index": grad.index, "shape": grad.shape})


def _is_laid_out_as_sum(have: np.ndarray[Any, Any], grad: Any) -> bool:
    """True if ``have + grad``, which the engine computes, has the strides of `have`; False where that is not known."""
    strides = getattr(grad, "strides", ())
    return bool(have.flags.c_contiguous) or strides == have.strides or not any(strides)


class _Flat:
    """Kernels of several outputs, with outputs and residuals in one tuple."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        outputs, *residuals = self._forward(*arguments, **options)
        return (*outputs, *residuals)


def _zeros_like(array: Any, shape: Any, dtype: Any) -> Any:
    return np.zeros_like(array, shape=shape, dtype=dtype)


def _fitted(rule: Callable[..., Any], target: Value, *arguments: Any) -> Any:
    """The gradient of a rule, summed down to its target."""
    grad = fit(rule(*arguments), target.shape, target.dtype, _NODE, 1)
    return np.asarray(grad) if isinstance(grad, np.generic) else grad


def _parts_of(grad: Any) -> Any:
    return grad.value, grad.index, grad.shape


def _add_slice(total: Any, value: Any, index: Any, shape: Any, out: Any) -> Any:
    SliceGradient(value, index, shape).add_to(out)
    return out


def _value_of(recorded: Recorded) -> Any:
    return recorded.value


def _ref_of(recorded: Recorded) -> Ref:
    return recorded.ref


def _refs(recorded: Any) -> list[Ref]:
    return [each.ref for each in recorded]


class _Named:
    """An object with the name of the program's node, for errors."""

    name = "a compiled function"


_NODE: Any = _Named()
