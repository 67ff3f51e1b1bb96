"""ProgramCode: a program with its code, ready to be called."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Set
from typing import Any, NoReturn

from aiograd.compiler.arena import ArenaPool
from aiograd.compiler.calls import ArrayCode
from aiograd.compiler.estimates import estimate, statement_cost
from aiograd.compiler.forward_code import arranged, forward_code, is_needed, saved_names, sources, uses
from aiograd.compiler.guard_code import surroundings_check
from aiograd.compiler.memory_guards import add_program
from aiograd.compiler.memory_plan import Recomputation
from aiograd.compiler.native.tiers import HOT, NativeTier, native_problem
from aiograd.compiler.node import explain
from aiograd.compiler.profiled import run_profiled
from aiograd.compiler.program import Program, layout_of, values_in
from aiograd.compiler.reached import is_left, needed_names, statements_run
from aiograd.compiler.result_code import results_maker
from aiograd.compiler.results import only, relate, returned
from aiograd.compiler.source import load
from aiograd.compiler.watching.kinds import has_hooks
from aiograd.compiler.watching.reads import Fit, Read
from aiograd.errors import AiogradError
from aiograd.graph.input_metadata import InputMetadata
from aiograd.running.modes import current_mode
from aiograd.tensors.core import refresh
from aiograd.tensors.op_error import REFUSALS, raise_op_error

#: numbers the runs of all programs, so that the least used is known
next_use = itertools.count(1).__next__


#: how often the short comparison of a program is made anew, which takes longer than the long one
MOST_CHECKS = 4


class GuardedCode:
    """A program and its guards.

    Args:
        name: of the function.
        program: its data.
        result: rebuilds the function's result from its outputs.
        reads: values that have to be there again.
        bound: inputs that have to be certain arrays, see `aiograd.compiler.watching.reads.read_inputs`.
        leaves: inputs that have to be leaves, or must not be.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        result: Callable[[list[Any]], Any],
        reads: list[Read],
        bound: tuple[tuple[int, Any], ...] = (),
        leaves: tuple[tuple[int, bool], ...] = (),
    ) -> None:
        self.name = name
        self.program = program
        self.result = result
        self.reads = reads
        self.bound = bound
        self.leaves = leaves
        #: identities of captured Tensors in the graph: an argument that is one of them has its uses added up in another order
        self.others = frozenset([id(tensor) for tensor, value in zip(program.tensors, program.captured, strict=True) if value.records])
        self.captured = [
            (tensor, value.shape, value.layout, value.dtype, value.records) for tensor, value in zip(program.tensors, program.captured, strict=True)
        ]
        self.used = 0
        self.runs = 0
        #: says at once that nothing has changed, see `aiograd.compiler.guard_code`; made at the first run, and anew where other objects are as good
        self.check: Callable[[], Any] = _unknown
        self._checks_made = 0
        #: True if the result is the only output
        self.is_plain = result is only and not program.views and program.returns is None
        #: the number of functions made that know the arguments of its calls
        self.checks_of_arguments = 0
        add_program(self)

    def renew_checks(self) -> None:
        """Forget the short comparisons of guards, so that other ones are made."""
        self.check, self._checks_made, self.checks_of_arguments = _unknown, 0, 0

    @property
    def numeric(self) -> tuple[ProgramCode, ...]:
        """The codes that compute: it, or its parts."""
        raise NotImplementedError

    @property
    def held_bytes(self) -> int:
        """Bytes of the arenas that are in use or free."""
        return sum([code.forward[1].nbytes for code in self.numeric])

    def takes(self, inputs: list[Any]) -> bool:
        """True if the program is right for these inputs, given the recorded layouts: bound arrays and captured Tensors are the same."""
        if not all([inputs[i]._data is array for i, array in self.bound]):
            return False
        if self.leaves and not all([inputs[i].is_leaf is is_leaf for i, is_leaf in self.leaves]):
            return False
        if any([has_hooks(tensor._node, tensor._nr) for tensor in [inputs[i] for i in self.program.differentiated]]):
            return False
        return not self.others or self.others.isdisjoint([id(tensor) for tensor in inputs if tensor._node is not None])

    def fit(self) -> Fit:
        """How the present state compares with the state that the program was made for."""
        if self.check():
            return Fit.SAME
        found = self.compared()
        if found is Fit.SAME and self._checks_made < MOST_CHECKS:
            self._checks_made += 1
            check = surroundings_check([(tensor, records) for tensor, _, _, _, records in self.captured], self.reads)
            if self.compared() is Fit.SAME:  # nothing has changed meanwhile, in another thread
                self.check = check
        return found

    def compared(self) -> Fit:
        """As `fit`, by looking through everything."""
        for tensor, shape, layout, dtype, records in self.captured:
            if tensor._x is not None:
                refresh(tensor)
            data = tensor._data
            if data.shape != shape or layout_of(data) != layout or data.dtype != dtype or (tensor._node is not None) is not records:
                return Fit.STALE
        return next((fit for read in self.reads if (fit := read.fit()) is not Fit.SAME), Fit.SAME)


def finished(code: GuardedCode, outputs: list[Any], tensors: list[Any]) -> Any:
    """The result of the function.

    Args:
        code: the code of the program that has run.
        outputs: its Tensors.
        tensors: inputs and captured Tensors.
    """
    program = code.program
    if program.views:
        relate([*outputs, *tensors], program.views)
    if program.returns is not None:
        outputs = returned(program.returns, [*outputs, *tensors])
    return code.result(outputs)


def _unknown() -> None:
    """Nothing is known."""


def raise_refusal(name: str, arrays: list[Any], error: Exception) -> NoReturn:
    """Raise the error of a statement; where numpy has refused its arguments, of the class that the operation itself would raise."""
    if not isinstance(error, REFUSALS):
        raise error
    try:
        raise_op_error(name, arrays, {}, error)
    except AiogradError as typed:
        for note in getattr(error, "__notes__", ()) if typed.__cause__ is error else ():
            typed.add_note(note)
        raise


class ProgramCode(GuardedCode):
    """A program with its code and all that its calls share.

    Args:
        name, program, *guards: see `GuardedCode`.
        tier: "auto", "numpy" or "native", see `aiograd.compiler.native.tiers`; with a budget there are no native functions, which keep memory
            of their own.
        memory_budget: the share of the memory for the backward that the program may hold; None: all.
        seed: the gradient of the only output in the pass that always follows, and the inputs of that pass, None for all leaves; see
            `aiograd.compiler.joint_pass`. None: there is no such pass.
    """

    def __init__(
        self, name: str, program: Program, *guards: Any, tier: str = "auto", is_dynamic: bool = False, memory_budget: float | None = None,
        seed: Any = None,
    ) -> None:
        super().__init__(name, program, *guards)
        #: computes the forward and that pass; None: nothing does
        self.joint: Callable[..., Any] | None = None
        if memory_budget is not None:
            program.recomputation = Recomputation(program, memory_budget)
        plain = forward_code(program)
        code, inside = arranged(program, plain)
        #: the function of the forward and its arenas; both change at once
        self.forward: tuple[Callable[..., Any], ArenaPool] = load(code, program.file), ArenaPool(code.arena)
        program.arena_bytes = self.forward[1].arena_bytes
        #: names of the saved values that lie in an arena
        self.inside = inside
        self.sources, counts = sources(program)
        self.has_repeats = max(counts, default=0) > 1
        self.all_needed = (True,) * len(self.sources)
        #: per edge, True if the pass that always follows wants its gradient
        self.joint_needs = self.all_needed
        if seed is not None and seed[1] is not None:
            given_tensors = [*[None] * len(program.inputs), *program.tensors]
            self.joint_needs = tuple([any([given_tensors[place] is each for each in seed[1]]) for place in self.sources])
        self.backwards: dict[Any, Callable[..., list[Any]]] = {}
        #: keys of the backwards with results that may share memory with the arena
        self.sharing: set[Any] = set()
        #: of a program with one output: the backwards for all edges, by the strides of the gradient
        self.whole: dict[Any, Callable[..., list[Any]]] = {}
        self.metadata = tuple([InputMetadata(value.shape, value.dtype, value.device) for value in program.outputs])
        self.saved = saved_names(program)
        saved = set(self.saved)
        self._statements: dict[Any, frozenset[int]] = {}
        self._edges: dict[frozenset[int], tuple[bool, ...]] = {}
        self._freed: dict[Any, frozenset[int]] = {}
        self._places: dict[Any, tuple[list[int], list[int]]] = {}
        #: the arguments of `statements_of` for all outputs and edges
        self._whole = (True,) * len(self.metadata), self.all_needed
        self._left: dict[frozenset[int], Any] = {}
        #: outputs with saved values
        names_given = {value.name for value in (*program.inputs, *program.captured)}
        shared = [*map(self._shared, program.outputs)]
        self.saved_outputs = [i for i, names in enumerate(shared) if not saved.isdisjoint(names) and names_given.isdisjoint(names)]
        self.estimate = estimate(program)
        if program.recomputation is not None:  # it is not cut into pieces for the loop
            self.estimate = sum(map(statement_cost, program.statements)) + program.recomputation.plan.extra
        #: the number of runs before the one that asks for native functions; 0: none does
        self.tier = tier
        #: by key of a backward: names of the saved values that its results may share memory with
        self.shared: dict[Any, set[str]] = {}
        self.hot = 0 if program.device != "cpu" or tier == "numpy" or memory_budget is not None else HOT
        #: makes the native functions; None where none are made
        has_joint = seed is not None and not self.saved_outputs and any(self.joint_needs)
        if has_joint and self.freed_by(((True,), self.joint_needs)) != self.freed_by(None):
            has_joint = False  # another pass may follow, to other edges
        self.native = NativeTier(self, plain, seed[0] if has_joint else None, is_dynamic=is_dynamic) if self.hot else None
        if self.native is not None and tier == "native" and native_problem() is None:
            self.hot = 0
            self.native.begin()
        #: makes the results of a call; made at the first run
        self._make: Callable[..., tuple[list[Any], Any]] | None = None

    def add_backward(self, key: Any, plain: ArrayCode, backward: Callable[..., list[Any]], shared: set[str]) -> None:
        """Keep the code of another kind of pass.

        Args:
            key: the key of the kind of pass.
            plain: its code, before any pass.
            backward: the function.
            shared: names of the saved values that its results may share memory with.
        """
        if key not in self.backwards:
            self.set_backward(key, backward, shared)
            if self.native is not None:
                self.native.add(key, plain, shared)

    def set_backward(self, key: Any, backward: Callable[..., list[Any]], shared: set[str]) -> None:
        """Make a function the one that runs a kind of pass; arguments as for `add_backward`."""
        self.shared[key] = shared
        if not self.inside.isdisjoint(shared):
            self.sharing.add(key)
        self.backwards[key] = backward
        strides, needs, sums = key
        if len(strides) == 1 and strides[0] is not None and needs == sums == self.all_needed:
            if key in self.sharing:
                self.whole.pop(strides[0], None)
            else:
                self.whole[strides[0]] = backward

    @property
    def numeric(self) -> tuple[ProgramCode, ...]:
        """It alone."""
        return (self,)

    def statements_of(self, present: tuple[bool, ...], needs: tuple[bool, ...]) -> frozenset[int]:
        """The statements that a pass runs.

        Args:
            present: per output, True if it has a gradient.
            needs: per edge, True if its gradient is wanted.
        """
        key = present, needs
        found = self._statements.get(key)
        if found is None:
            found = self._statements[key] = statements_run(self.program, *key)
        return found

    @property
    def every(self) -> frozenset[int]:
        """The statements that a pass of the whole runs."""
        return self.statements_of(*self._whole)

    def freed_by(self, ran: Any) -> frozenset[int]:
        """The statements with saved arrays that a pass runs.

        Args:
            ran: the arguments of `statements_of`; None: all outputs have a gradient, and all edges are wanted.
        """
        found = self._freed.get(ran)
        if found is None:
            statements = self.program.statements
            run = self.statements_of(*ran) if ran else self.every
            found = self._freed[ran] = frozenset([number for number in run if statements[number].node.holds_data])  # type: ignore[union-attr]
        return found

    def gone_after(self, ran: Any, gone: frozenset[int]) -> frozenset[int]:
        """The statements whose arrays are freed after a pass, by those before it; arguments as of `freed_by`."""
        return gone | self.freed_by(ran) if gone else self.freed_by(ran)

    def places_of(self, present: tuple[bool, ...], needs: tuple[bool, ...]) -> tuple[list[int], list[int]]:
        """The saved values that the rules of a pass need: places among inputs and captured Tensors, and numbers among `saved_outputs`.

        Args:
            present, needs: as of `statements_of`.
        """
        key = present, needs
        found = self._places.get(key)
        if found is None:
            run, recomputation = self.statements_of(*key), self.program.recomputation
            needed = needed_names(self.program, run)
            again = [] if recomputation is None else [number for numbers, _ in recomputation.of_pass(run).values() for number in numbers]
            for statement in [self.program.statements[number] for number in again]:
                needed.update([value.name for value in values_in((statement.arrays, statement.statics))])
            groups = [self._shared(value) for value in (*self.program.inputs, *self.program.captured)]
            outputs = [self._shared(self.program.outputs[place]) for place in self.saved_outputs]
            places, numbers = ([i for i, names in enumerate(each) if not needed.isdisjoint(names)] for each in (groups, outputs))
            found = self._places[key] = places, numbers
        return found

    @functools.cached_property
    def whole_places(self) -> tuple[list[int], list[int]]:
        """As `places_of`, of a pass of the whole."""
        return self.places_of(*self._whole)

    def _shared(self, value: Any) -> frozenset[str]:
        """The names of all values that share a version counter with one."""
        return self.program.shared.get(value.name, frozenset((value.name,)))

    def names_left(self, gone: frozenset[int]) -> Any:
        """Names of the saved arrays that passes without the statements `gone` need; None if there is no such pass."""
        if gone not in self._left:
            left = self.every - gone
            self._left[gone] = needed_names(self.program, left) if is_left(self.program, left) else None
        return self._left[gone]

    def only(self, arrays: Any, kept: Set[str]) -> Any:
        """Saved arrays with None in the place of those with other names; all within a memory budget, where one may be computed from another."""
        if not kept:
            return [None] * len(self.saved) if arrays.__class__ is list else (None,) * len(self.saved)
        if self.program.recomputation is not None:
            return arrays
        return tuple([array if name in kept else None for name, array in zip(self.saved, arrays, strict=True)])

    @functools.cached_property
    def inner_outputs(self) -> frozenset[int]:
        """The places of the outputs whose gradients come from statements too, not only from uses outside of the program."""
        statements = [self.program.statements[number] for number in self.statements_of((True,) * len(self.metadata), self.all_needed)]
        used = {value.name for each in statements for i, value in enumerate(each.arrays) if value is not None and is_needed(each, i)}
        return frozenset([i for i, value in enumerate(self.program.outputs) if value.name in used])

    @functools.cached_property
    def has_paths(self) -> bool:
        """True if some outputs lead to some of the edges only."""
        return len(self.metadata) > 1 and not all([all(self.edges_from(frozenset([i]))) for i in range(len(self.metadata))])

    def edges_from(self, outputs: frozenset[int]) -> tuple[bool, ...]:
        """Per edge, True if the statements lead from one of the outputs to it."""
        found = self._edges.get(outputs)
        if found is None:
            run = self.statements_of(tuple([i in outputs for i in range(len(self.metadata))]), self.all_needed)
            reached = {place for number, _, place in uses(self.program) if number in run}
            found = self._edges[outputs] = tuple([place in reached for place in self.sources])
        return found

    def results_maker(self) -> Callable[..., tuple[list[Any], Any]]:
        """The function that makes the results of a call."""
        make = self._make
        if make is None:
            make = self._make = results_maker(self.program, self.sources, self.saved_outputs)
        return make

    def count(self) -> None:
        """Count a run."""
        self.used = next_use()
        self.runs += 1
        if self.runs == self.hot and self.native is not None:
            self.native.ask()

    def run(self, inputs: list[Any]) -> Any:
        """One call."""
        self.count()
        tensors = [*inputs, *self.program.tensors]
        mode = current_mode()
        profiler = mode.profiler
        arena = None
        try:
            if profiler is None:
                given = [tensor._data for tensor in tensors]
                forward, arenas = self.forward
                arena = arenas.take()
                if arena is not None:
                    given.append(arena.arrays)
                arrays, saved = forward(*given)
            else:
                arrays, saved = run_profiled(self.program, [tensor._data for tensor in tensors], profiler, self.name)
        except Exception as error:
            explain(error, self.name)
            raise_refusal(self.name, [tensor._data for tensor in tensors], error)
        outputs, node = self.results_maker()(self, tensors, arrays, saved, arena)
        if mode.collect is not None and node is not None:
            mode.collect(node)
        return outputs[0] if self.is_plain else finished(self, outputs, tensors)

    async def run_away(self, inputs: list[Any], offload: Callable[..., Any]) -> Any:
        """As `run`; the arrays are computed on an executor, and all else here.

        Args:
            inputs: the Tensors among the arguments.
            offload: runs a function without arguments on the executor.

        Cancelling it drops the result; the arena of the call is in use until the computation ends.
        """
        self.count()
        tensors = [*inputs, *self.program.tensors]
        given = [tensor._data for tensor in tensors]
        mode = current_mode()
        forward, arenas = self.forward
        arena = None
        if mode.profiler is None:
            arena = arenas.take()
            compute = functools.partial(_computed, forward, given, arena)
        else:
            compute = functools.partial(run_profiled, self.program, given, mode.profiler, self.name)
        try:
            arrays, saved = await offload(compute)
        except Exception as error:
            explain(error, self.name)
            raise_refusal(self.name, given, error)
        outputs, node = self.results_maker()(self, tensors, arrays, saved, arena)
        if mode.collect is not None and node is not None:
            mode.collect(node)
        return finished(self, outputs, tensors)


def _computed(forward: Callable[..., Any], given: list[Any], arena: Any) -> Any:
    """The results of a forward in an arena, which its owner keeps until then."""
    return forward(*given) if arena is None else forward(*given, arena.arrays)
