"""StepCode: a program that does more than compute, such as a whole training step, as parts that run one after the other.

Note [Parts of a step]
    Rows between two calls (an optimizer's step, a backward pass) are one part: a `ProgramCode`, with one node of the graph where gradients are
    wanted. The calls themselves are made as the function made them, with this run's Tensors. So a pass is one of the engine's, with all its
    duties: hooks, cancellation, deadlines, the commit in one step; and an optimizer reads its options, and a schedule its place, at every run.
    Where a run fails or is cancelled, the parts before have happened and those after have not, as in the eager function.

Note [Short ways]
    Two kinds of calls are made in a shorter way where that has the same effect: a pass from one output, which the engine runs at once if it may
    (`Engine.run_at_once`), without looking at arguments that are known; and an optimizer's step (`aiograd.compiler.updates`). Where a short way
    refuses, nothing has been done, and the call is made.

Note [Segments]
    A long run of rows is cut as well, so that the engine has nodes to place: between them it gives the loop its turns, and cancellation and
    deadlines act. Light statements make segments that fit the loop's budget; heavy ones, which would leave the loop by themselves, take
    their segment with them to the executor, where independent ones run at the same time, and those in a row are one job
    (Note [Nodes in a row] in `aiograd.engine.run.pass_jobs`). The forward of an ``async def`` waits between its segments, see
    `aiograd.compiler.awaited_forward`.

Note [Layouts of gradients]
    The code of a part is made for the strides of its arguments. A gradient may have other strides than in the recorded run: the engine and a program
    add gradients in different places, and users set `.grad` themselves. So the results of calls, and gradients that are read, are copied into the
    recorded strides where theirs differ.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np

from aiograd.compiler.awaited_forward import AwaitedForward, ForwardPart
from aiograd.compiler.effects import ArgumentPlace, CalledOp, DrawOp, RepeatedCall
from aiograd.compiler.estimates import START_NS, STATEMENT_NS, statement_cost
from aiograd.compiler.joint_pass import run_jointly
from aiograd.compiler.program import Program, Statement, Value, ValueKind, laid_out, values_in
from aiograd.compiler.program_code import GuardedCode, ProgramCode, finished, next_use
from aiograd.compiler.updates import NativeUpdate, inlined_step, step_of
from aiograd.engine.placement import INLINE_NS
from aiograd.engine.run.current import current_engine
from aiograd.engine.run.loop import check_can_run
from aiograd.errors import TraceError
from aiograd.running.modes import current_mode
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore, make, refresh
from aiograd.tensors.passes import ONE, backward

#: estimated nanoseconds of light statements in one segment, within `aiograd.engine.run.engine.BUDGET`
SEGMENT_NS = 1_000_000.0
#: estimated nanoseconds of heavy statements in one segment
HEAVY_NS = 10_000_000.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: some rows as one program, one call, or rows that are awaited.

    Attributes:
        statement: the call; None for rows.
        code: the code of the rows; None for a call.
        takes, gives: places of the Tensors that it takes and makes, among the Tensors of the run.
        short: makes the call in a shorter way and returns True, see Note [Short ways]; None where there is none.
        forward: the rows that are awaited; None for all else.
    """

    statement: Statement | None
    code: ProgramCode | None
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    short: Callable[..., bool] | None = None
    forward: AwaitedForward | None = None


class StepCode(GuardedCode):
    """A program with calls among its statements, see the module's Note; its arguments are those given to `GuardedCode`.

    Args:
        tier, is_dynamic, memory_budget: see `ProgramCode`.
        is_awaited: True for an ``async def``.
    """

    def __init__(
        self, name: str, program: Program, *guards: Any, tier: str = "auto", is_dynamic: bool = False, memory_budget: float | None = None,
        is_awaited: bool = False,
    ) -> None:
        super().__init__(name, program, *guards)
        self._options: dict[str, Any] = {"tier": tier, "is_dynamic": is_dynamic, "memory_budget": memory_budget}
        #: by name of a value, its place among the Tensors of a run: the inputs first, then the captured ones
        self._places = {value.name: i for i, value in enumerate((*program.inputs, *program.captured))}
        cuts = memory_budget is None
        groups = [*_awaited(segments(program, cuts=cuts, cost=forward_cost), cuts)] if is_awaited else [(0, segments(program, cuts=cuts))]
        numbers = [number for number, group in groups for _ in group]
        divided = _divided(program, [rows for _, group in groups for rows in group])
        found = [(number, *entry) for number, entry in zip(numbers, divided, strict=True) if entry[1] or not all([each.is_row for each in entry[0]])]
        after = [*[rows[0] for _, rows, _ in found[1:]], None][: len(found)]  # none for a function without an operation
        made = [
            (number, rows, self._part(rows, outputs, None if number else _seed_of(outputs, then)))
            for (number, rows, outputs), then in zip(found, after, strict=True)
        ]
        self._parts: list[Part] = []
        for number, entries in itertools.groupby(made, lambda entry: entry[0]):
            if number:
                self._parts.append(self._awaited_part([(rows, part) for _, rows, part in entries], [part for _, _, part in made]))
            else:
                self._parts += [part for _, _, part in entries]
        self._returns = [(self._places[value.name], value.records) for value in program.outputs]
        program.parts = tuple([code.program for code in self.numeric])
        program.arena_bytes = sum([part.arena_bytes for part in program.parts])

    @property
    def numeric(self) -> tuple[ProgramCode, ...]:
        """Its parts that compute."""
        parts = [part for each in self._parts for part in ([each] if each.forward is None else [inner.part for inner in each.forward.parts])]
        return tuple([part.code for part in parts if part.code is not None])

    def _awaited_part(self, entries: list[tuple[tuple[Statement, ...], Part]], every: list[Part]) -> Part:
        """Rows that are awaited as one part.

        Args:
            entries: their segments, each with its part.
            every: all parts of the step.
        """
        last = {place: part for part in every for place in part.takes} | {self._places[value.name]: None for value in self.program.outputs}
        made = {place for _, part in entries[not all([each.is_row for each in entries[0][0]]) :] for place in part.gives}
        inside = {value.name for rows, _ in entries for statement in rows for value in statement.outputs}
        parts: list[ForwardPart] = []
        reads: dict[int, int] = {}
        for number, (rows, part) in enumerate(entries):
            for value in values_in([(statement.arrays, statement.statics) for statement in rows if statement.is_row]):
                if value.name not in inside:
                    reads[self._places[value.name]] = number
            costs = [] if any([statement.is_on_device for statement in rows]) else list(map(forward_cost, rows))
            cost = sum(costs) if max(costs, default=0.0) > INLINE_NS else min(sum(costs), INLINE_NS)
            frees = tuple([place for place in made if last.get(place, self) is part])
            parts.append(ForwardPart(part, all([statement.is_row for statement in rows]), cost, frees))
        return Part(None, None, (), (), forward=AwaitedForward(self.name, parts, reads, self._carry_out))

    def _part(self, statements: tuple[Statement, ...], outputs: tuple[Value, ...], seed: Any) -> Part:
        program, places = self.program, self._places
        first = statements[0]
        if isinstance(first.op, CalledOp):
            takes = tuple([places[value.name] for value in first.arrays if value is not None])
            gives = tuple([places.setdefault(value.name, len(places)) for value in first.outputs])
            return Part(first, None, takes, gives, self._short_way(first))
        made = {value for statement in statements for value in statement.outputs}
        names = {value.name for value in made}
        inputs: dict[Value, Value] = {}
        captured: dict[Value, Value] = {}
        for value in values_in([(statement.arrays, statement.statics) for statement in statements]):
            known = captured if value.kind is ValueKind.CAPTURED else inputs
            if value.name not in names and value not in known:
                kind = ValueKind.CAPTURED if known is captured else ValueKind.INPUT
                known[value] = Value(kind, len(known), value.shape, value.dtype, value.records, value.strides, value.device)
        own = inputs | captured
        moved = tuple([_moved(statement, own) for statement in statements])
        tensors = tuple([program.tensors[value.index] for value in captured])
        given = tuple(inputs.values()), tuple(captured.values())
        of_whole = {value.name: value.name for value in made} | {value.name: each.name for each, value in own.items()}
        owners = {name: program.owners[each] for name, each in of_whole.items() if each in program.owners}
        part = Program(program.signature, *given, tensors, moved, outputs, shared=_shared(program, of_whole), owners=owners, file=program.file)
        takes = tuple([places[value.name] for value in inputs])
        gives = tuple([places.setdefault(value.name, len(places)) for value in outputs])
        return Part(None, ProgramCode(self.name, part, list, [], **self._options, seed=seed), takes, gives)

    def _short_way(self, statement: Statement) -> Callable[..., bool] | None:
        """The short way of a call, see Note [Short ways]; its text, or a comment in its place, is added to the program's text."""
        optimizer = step_of(statement.op.repeated.function, statement.op.repeated.args)  # type: ignore[attr-defined]
        if optimizer is not None:
            updates: list[NativeUpdate] = []
            step = inlined_step(optimizer, f"{statement.place}: {statement.line}", self.program.file, self._options["tier"], updates)
            self.program.updates[id(statement)] = updates
            if step is not None:
                return step
        awaits = "await " if statement.op.is_awaited else ""  # type: ignore[attr-defined]
        given = "".join([f"{value.name}, " for value in statement.outputs])[:-2]
        taken = ", ".join([value.name for value in statement.arrays if value is not None])
        text = f"{given}{' = ' if given else ''}{awaits}{statement.op.name}({taken})"
        self.program.file.add(f"# {text}  # {statement.place}: {statement.line}\n")
        return _short_pass(statement)

    # ---------------------------------------------------------------- running

    def run(self, inputs: list[Any]) -> Any:
        """Run one call of a step that awaits nothing."""
        tensors = self._begin(inputs)
        for part in self._parts:
            self._carry_out(part, tensors)
        return self._result(tensors)

    def run_async(self, inputs: list[Any]) -> Coroutine[Any, Any, Any]:
        """Run one call. Cancelling stops it as it would stop the function itself."""
        profiler = current_mode().profiler
        return self._run_parts(inputs) if profiler is None else self._run_profiled(inputs, profiler)

    async def _run_profiled(self, inputs: list[Any], profiler: Any) -> Any:
        began = perf_counter_ns()
        try:
            return await self._run_parts(inputs)
        finally:
            profiler.add(self.name, "scope", self.name, began, perf_counter_ns())

    async def _run_parts(self, inputs: list[Any]) -> Any:
        tensors = self._begin(inputs)
        is_done = False
        for part in self._parts:
            called = part.statement
            if is_done:
                is_done = False
                continue
            if called is None or not called.op.is_awaited:  # type: ignore[attr-defined]
                if part.code is None and part.forward is not None:
                    await part.forward.run(tensors)
                    continue
                is_done = part.code is not None and part.code.joint is not None and self._carry_out_jointly(part, tensors)
                if not is_done:
                    self._carry_out(part, tensors)
                continue
            try:
                taken = [tensors[i] for i in part.takes]
                if part.short is None or not part.short(*taken):
                    self._take(part, await called.op.forward(*taken), tensors)
            except BaseException as error:
                self._explain(error, called)
                raise
        return self._result(tensors)

    def _begin(self, inputs: list[Any]) -> list[Any]:
        self.used = next_use()
        self.runs += 1
        return [*inputs, *self.program.tensors, *[None] * (len(self._places) - len(inputs) - len(self.program.tensors))]

    def _carry_out(self, part: Part, tensors: list[Any]) -> None:
        taken = [tensors[i] for i in part.takes]
        if part.code is None:
            called: Any = part.statement
            try:
                if part.short is None or not part.short(*taken):
                    self._take(part, called.op.forward(*taken), tensors)
            except BaseException as error:
                self._explain(error, called)
                raise
            return
        for tensor in part.code.program.tensors:
            if tensor._x is not None:
                refresh(tensor)
        for i, tensor in zip(part.gives, part.code.run(taken), strict=True):
            tensors[i] = tensor

    def _carry_out_jointly(self, part: Part, tensors: list[Any]) -> bool:
        """Carry out a part and the pass that follows; False: nothing has been done. See `aiograd.compiler.joint_pass`."""
        code: Any = part.code
        for tensor in code.program.tensors:
            if tensor._x is not None:
                refresh(tensor)
        made = run_jointly(code, [tensors[i] for i in part.takes])
        if made is None:
            return False
        (tensors[part.gives[0]],) = made
        return True

    def _explain(self, error: BaseException, called: Statement) -> None:
        error.add_note(f"in the compiled function {self.name}, {called.op.name} at {called.place}: `{called.line}`")

    def _take(self, part: Part, result: Any, tensors: list[Any]) -> None:
        if result is None and not part.gives:
            return
        found = leaves_of(result, TensorCore)
        if len(found) != len(part.gives):
            name = "a call" if part.statement is None else part.statement.op.name
            raise TraceError(f"in the compiled function {self.name}, {name} returned {len(found)} tensors; it was recorded with {len(part.gives)}")
        for i, tensor, value in zip(part.gives, found, part.statement.outputs, strict=True):  # type: ignore[union-attr]
            tensors[i] = tensor = _as_recorded(tensor, value)
            if tensor._node is not None and hasattr(tensor._node, "forward_line"):
                tensor._node.forward_line = part.statement.place  # type: ignore[union-attr]

    def _result(self, tensors: Sequence[Any]) -> Any:
        outputs: list[Any] = []
        for i, records in self._returns:
            tensor = tensors[i]
            outputs.append(tensor if records or tensor._node is None else make(tensor._data, shared_with=tensor))
        return finished(self, outputs, list(tensors[: len(self.program.inputs) + len(self.program.captured)]))


def _as_recorded(tensor: Any, value: Value) -> Any:
    """A Tensor that a call has returned, in a copy where its layout is not the recorded one; see Note [Layouts of gradients]."""
    data = tensor._data
    array = data if data.__class__ is not np.ndarray else laid_out(data, value)
    if array is data:
        return tensor
    copy = make(array, cls=type(tensor))
    copy._node, copy._nr = tensor._node, tensor._nr
    return copy


def _seed_of(outputs: tuple[Value, ...], then: Statement | None) -> Any:
    """The gradient with which a short pass from the only output begins, and its inputs; None where no such pass follows, or it keeps the graph."""
    short = None if then is None or len(outputs) != 1 or not isinstance(then.op, CalledOp) else _short_pass(then)
    if short is None or then is None or [value and value.name for value in then.arrays] != [outputs[0].name]:
        return None
    seed, keep_graph, inputs = short.args  # type: ignore[attr-defined]
    return None if keep_graph else (seed, inputs)


def _short_pass(statement: Statement) -> Callable[..., bool] | None:
    """The short way of a pass from one output; None for any other call."""
    call: RepeatedCall = statement.op.repeated  # type: ignore[attr-defined]
    if call.function is not backward or len(statement.arrays) != 1:
        return None
    (value,) = statement.arrays
    tensors, grads = call.args
    options = dict(call.kwargs)
    keep_graph, inputs = bool(options.pop("retain_graph")), options.pop("inputs")
    seed = None if value is None or value.shape != () or value.device != "cpu" else ONE.get(value.dtype.num)
    if tensors.__class__ is not ArgumentPlace or grads is not None or seed is None or any(options.values()):
        return None
    if inputs is not None and not (inputs.__class__ in (list, tuple) and inputs and all([isinstance(each, TensorCore) for each in inputs])):
        return None
    return functools.partial(_pass_at_once, seed, keep_graph, inputs)


def _pass_at_once(seed: Any, keep_graph: bool, inputs: Sequence[TensorCore] | None, tensor: Any) -> bool:
    """Run the pass from a tensor, to all leaves or to these inputs, if it is one over a single program that may run now."""
    node = tensor._node
    if node is None or tensor._vc is not None:
        return False
    wanted = None if inputs is None else {each._node for each in inputs}
    if wanted is not None and not all([leaf is not None and leaf.is_leaf for leaf in wanted]):
        return False
    check_can_run("backward()")
    return current_engine().run_at_once((node, tensor._nr), seed, keep_graph, wanted)


def forward_cost(statement: Statement) -> float:
    """Estimated nanoseconds of a statement, whether or not it has a backward."""
    return START_NS if statement.is_on_device else STATEMENT_NS + statement.cost


def segments(program: Program, *, cuts: bool = True, cost: Callable[[Statement], float] = statement_cost) -> list[list[Statement]]:
    """The statements of each part. See Note [Segments].

    Args:
        program: the program.
        cuts: False: rows between two calls are one part, as a plan of memory needs them.
        cost: estimates a statement.
    """
    found: list[list[Statement]] = []
    light = heavy = 0.0
    for statement in program.statements:
        added = cost(statement)
        is_heavy = added > INLINE_NS
        light, heavy = (light, heavy + added) if is_heavy else (light + added, heavy)
        begins = not found or isinstance(found[-1][0].op, CalledOp) or isinstance(statement.op, CalledOp)
        if begins or (cuts and (light > SEGMENT_NS or (is_heavy and heavy > HEAVY_NS))):
            found.append([])
            light, heavy = (0.0, added) if is_heavy else (added, 0.0)
        found[-1].append(statement)
    return found


def _awaited(found: list[list[Statement]], cuts: bool) -> Iterator[tuple[int, list[list[Statement]]]]:
    """Segments between two calls, each with a number above 0 if they are awaited.

    Args:
        found: the segments.
        cuts: False: they cannot be divided.
    """
    for number, (is_call, each) in enumerate(itertools.groupby(found, lambda rows: isinstance(rows[0].op, CalledOp)), 1):
        group = [*each]
        is_long = not is_call and (len(group) > 1 or _is_heavy(group[0])) and not any([_reads_gradient(s) for rows in group for s in rows])
        if is_long and (cuts or all([statement.is_row for rows in group for statement in rows])):
            yield number, [*_arranged(group)]
        else:
            yield 0, group


def _arranged(group: list[list[Statement]]) -> Iterator[list[Statement]]:
    """Segments to be awaited: leading effects and all draws first; effects in segments of their own where the rows may leave the loop."""
    statements = [statement for rows in group for statement in rows]
    leading = [*itertools.takewhile(lambda statement: not statement.is_row, statements)]
    first = [*leading, *[statement for statement in statements[len(leading) :] if isinstance(statement.op, DrawOp)]]
    if first:
        yield first
    moved = set(map(id, first))
    for rows in group:
        left = [statement for statement in rows if id(statement) not in moved]
        if _is_heavy(left):
            yield from [[*part] for _, part in itertools.groupby(left, lambda statement: statement.is_row)]
        elif left:
            yield left


def _is_heavy(rows: list[Statement]) -> bool:
    return max(map(forward_cost, rows), default=0.0) > INLINE_NS


def _reads_gradient(statement: Statement) -> bool:
    """True for a statement that takes the gradient of a leaf, whose changes have no version."""
    return not statement.is_row and statement.op.name == "grad"


def _divided(program: Program, groups: list[list[Statement]]) -> list[tuple[tuple[Statement, ...], tuple[Value, ...]]]:
    """The groups of statements, each with its values that are used outside of it."""
    users: dict[str, set[int]] = {value.name: {len(groups)} for value in program.outputs}
    for number, group in enumerate(groups):
        for value in values_in([(statement.arrays, statement.statics) for statement in group]):
            users.setdefault(value.name, set()).add(number)
    found = []
    for number, group in enumerate(groups):
        outputs = [value for statement in group for value in statement.outputs if users.get(value.name, {number}) != {number}]
        found.append((tuple(group), tuple(outputs)))
    return found


def _shared(program: Program, of_whole: dict[str, str]) -> dict[str, frozenset[str]]:
    """By name of a value of a part, the names of all in the part that share its version counter.

    Args:
        program: the whole.
        of_whole: by name of a value of the part, its name in the whole.
    """
    groups: dict[frozenset[str], list[str]] = {}
    for name, each in of_whole.items():
        groups.setdefault(program.shared.get(each, frozenset((each,))), []).append(name)
    return {name: frozenset(names) for names in groups.values() if len(names) > 1 for name in names}


def _moved(statement: Statement, own: dict[Value, Value]) -> Statement:
    """A statement with the values of a part in place of the whole's."""
    arrays, statics = map_tree(lambda value: own.get(value, value), (statement.arrays, statement.statics), Value)
    return replace(statement, arrays=arrays, statics=statics)
