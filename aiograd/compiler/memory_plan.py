"""Recomputation: a program within a memory budget.

Note [Planned values]
    The values of the planner are groups of statements: those whose results lie in the same memory (a view and what it shows), with the residuals of
    their kernels. A group is kept or computed again as a whole. Arguments and captured Tensors are there anyway, so they count nothing; what reads
    one that the program itself writes to is never computed again. Random draws note the state of their generator, and are drawn again from it.
    A value that no rule reads and one group only is a temporary of that group: it is made and dropped with it, and counts nothing, as in the forward.

Note [Freeing within a budget]
    The saved arrays are a list, which the function of the backward empties: each array goes after its last use. A pass that keeps the graph, or that
    runs only a part of the program, gets a copy of the list; then what is kept stays until its end. A pass that records a graph runs the rows
    again and holds what the eager call would hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from aiograd.compiler.effects import DrawOp
from aiograd.compiler.estimates import STATEMENT_NS
from aiograd.compiler.forward_code import names_of, residual, rule_inputs
from aiograd.compiler.passes.recompute import RecomputePlan, plan
from aiograd.compiler.program import Program, Statement, ValueKind, values_in
from aiograd.errors import ArgumentError
from aiograd.ops.op import Fused
from aiograd.running.random_streams import Draws

#: the residual of a draw that has the state of its generator
DRAWS = "draws"


@dataclass(frozen=True)
class MemoryPlan:
    """Which values a program with a memory budget keeps for its backward, and which it computes again.

    Attributes:
        budget: the share of the memory that it may hold.
        kept: names of the values that the forward keeps, as the program's text has them.
        recompute: for each statement whose backward needs it, its number and the names of the values that are computed again just before.
        peak: the most bytes that it holds for the backward at any time.
        full: the bytes that it would hold without a budget.
        extra: estimated nanoseconds of the recomputation.
        live, live_full: by step of the backward, the bytes held with and without the budget.
        again_before: by step, the number of values that are computed again before it.
    """

    budget: float
    kept: frozenset[str]
    recompute: tuple[tuple[int, tuple[str, ...]], ...]
    peak: int
    full: int
    extra: float
    live: tuple[int, ...]
    live_full: tuple[int, ...]
    again_before: tuple[int, ...] = ()

    def __str__(self) -> str:
        share = self.peak / self.full if self.full else 0.0
        again = sum([len(names) for _, names in self.recompute])
        return (
            f"holds at most {self.peak:,} of {self.full:,} bytes ({share:.2f}, budget {self.budget}): {len(self.kept)} values kept, "
            f"{again} computed again in an estimated {self.extra / 1e6:.3f} ms"
        )

    def joined(self, others: Sequence[MemoryPlan]) -> MemoryPlan:
        """One plan for the parts of a step, the last of which runs backward first. The sum of their peaks is an upper bound."""
        if not others:
            return self
        every = [self, *others]
        recompute = [entry for each in reversed(every) for entry in each.recompute]
        live: list[int] = []
        live_full: list[int] = []
        for number, each in reversed([*enumerate(every)]):
            before = every[:number]
            live += [held + sum([one.live[0] for one in before if one.live]) for held in each.live]
            live_full += [held + sum([one.full for one in before]) for held in each.live_full]
        return MemoryPlan(
            self.budget, frozenset().union(*[each.kept for each in every]), tuple(recompute), sum([each.peak for each in every]),
            sum([each.full for each in every]), math.fsum([each.extra for each in every]), tuple(live), tuple(live_full),
            tuple([count for each in reversed(every) for count in each.again_before]),
        )


class Recomputation:
    """The plan of a program, in its statements.

    Args:
        program: the program; its draws become draws that note their state, and it saves what the plan keeps.
        budget: the share of the memory.

    Raises:
        ArgumentError: the program is one of a device, or no plan was found.
    """

    def __init__(self, program: Program, budget: float) -> None:
        if program.device != "cpu":
            raise ArgumentError(f"memory_budget={budget}: the program computes on {program.device}; budgets are for the host. Compile without one.")
        self.program = program
        program.statements = tuple([_noting(statement) for statement in program.statements])
        self._groups, self._group_of = _grouped(program)
        self._written = self._written_owners()
        steps = [number for number in reversed(range(len(program.statements))) if program.statements[number].node is not None]
        #: the statements whose backward runs, in its order; by it, the groups that its rules read
        self.reads = {number: self._groups_in(self._rule_names(number)) for number in steps}
        #: values that cannot be had again, for passes that record a graph
        fixed = [value.name for each in program.statements if not _can_repeat(each) for value in each.outputs] if steps else []
        values = [self._value(group) for group in range(len(self._groups))]
        uses = [*self.reads.values(), self._groups_in(fixed)]
        #: by statement, names of temporaries that are needed no more after it has been computed again
        self.dropped: dict[int, list[str]] = {}
        values = self._with_temporaries(values, set().union(*uses))
        self.plan: RecomputePlan = plan(values, [tuple(each) for each in uses], budget)
        self._arguments = [set(reads) for _, _, reads in values]
        self.again = dict(zip(steps, self.plan.recompute, strict=False))
        program.saved = self._saved(fixed)
        sizes = [size for _, size, _ in values]
        later: list[set[int]] = [set()]
        for use in reversed(uses):
            later.append(later[-1] | set(use))
        self.memory_plan = MemoryPlan(
            budget, frozenset([name for name in program.saved if name in self._group_of and not name.endswith(DRAWS)]),
            tuple([(number, tuple([name for group in groups for name in self._names(group)])) for number, groups in self.again.items() if groups]),
            self.plan.peak, self.plan.full, self.plan.extra, self.plan.live[:-1],
            tuple([sum([sizes[each] for each in held]) for held in later[:1:-1]]), tuple(map(len, self.plan.recompute[:-1])),
        )

    # ---------------------------------------------------------------- planning

    def _rule_names(self, number: int) -> list[str]:
        statement = self.program.statements[number]
        return [each for name in rule_inputs(statement) for each in names_of(statement, number, name)]

    def _groups_in(self, names: Sequence[str]) -> set[int]:
        return {self._group_of[name] for name in names if name in self._group_of}

    def _names(self, group: int) -> list[str]:
        return [value.name for number in self._groups[group] for value in self.program.statements[number].outputs]

    def _written_owners(self) -> set[int]:
        """Numbers of the arrays of arguments and captured Tensors that the program writes to."""
        owners, found = self.program.owners, set()
        for statement in self.program.statements:
            if not _can_repeat(statement):
                found.update([owners[value.name][0] for value in statement.arrays if value is not None and value.name in owners])
        return found

    def _value(self, group: int) -> tuple[float, int, tuple[int, ...]]:
        """A group as the planner has it: cost, bytes, and the groups that it reads."""
        program, owners = self.program, self.program.owners
        given = {owners[value.name][0] for value in (*program.inputs, *program.captured) if value.name in owners}
        cost, memory, reads = 0.0, dict[int, int](), set()
        size = 0
        for number in self._groups[group]:
            statement = program.statements[number]
            arguments = _arguments(statement)
            reads |= self._groups_in([value.name for value in arguments])
            cost += STATEMENT_NS + (0.0 if statement.op.view else statement.cost)
            size += sum(statement.residuals)
            memory.update([owners[value.name] for value in statement.outputs if owners[value.name][0] not in given])
            is_written = any([owners[value.name][0] in self._written for value in arguments if value.kind is not ValueKind.COMPUTED])
            if is_written or not _can_repeat(statement):
                cost = math.inf
        reads.discard(group)
        if any([each > group for each in reads]):
            cost = math.inf
        return cost, size + sum(memory.values()), tuple(sorted(reads)) if cost < math.inf else ()

    def _with_temporaries(self, values: list[Any], read: Set[int]) -> list[Any]:
        """The groups as the planner has them, with temporaries joined to the groups that read them."""
        readers: dict[int, list[int]] = {}
        for group, (_, _, reads) in enumerate(values):
            for each in reads:
                readers.setdefault(each, []).append(group)
        found = [*values]
        for group, (cost, _, _) in enumerate(values):
            into = readers.get(group, [])
            if group in read or len(into) != 1 or max(cost, found[into[0]][0]) == math.inf:
                continue
            joined, names = into[0], set(self._names(group))
            cost, size, reads = found[joined]
            found[joined] = (cost + found[group][0], size, tuple(sorted({*reads, *found[group][2]} - {group})))
            found[group] = (math.inf, 0, ())
            statements = self.program.statements
            last = max([number for number in self._groups[joined] if not names.isdisjoint([value.name for value in _arguments(statements[number])])])
            self.dropped.setdefault(last, []).extend([name for name, each in self._group_of.items() if each == group])
            self._groups[joined] = sorted([*self._groups[group], *self._groups[joined]])
        return found

    def _saved(self, fixed: Sequence[str]) -> list[str]:
        """Names of all that the backward is given."""
        program = self.program
        again = {group for groups in self.again.values() for group in groups}
        numbers = [number for group in sorted(again) for number in self._groups[group]]
        needed = dict.fromkeys([*fixed, *[name for number in self.reads for name in self._rule_names(number)]])
        temporary = {name for names in self.dropped.values() for name in names}
        read = [value.name for number in numbers for value in _arguments(program.statements[number]) if value.name not in temporary]
        needed.update(dict.fromkeys(read))
        found = [name for name in needed if name not in self._group_of or self._group_of[name] in self.plan.kept]
        if self.reads:
            found += [residual(number, DRAWS) for number, each in enumerate(program.statements) if isinstance(each.op, DrawOp)]
        return found

    # ---------------------------------------------------------------- the pass

    def of_pass(self, run: Set[int]) -> dict[int, tuple[tuple[int, ...], frozenset[str]]]:
        """For a pass that runs some statements: by each, the statements to compute again before it, and names that are needed no more after it."""
        steps = [number for number in self.reads if number in run]
        later: set[int] = set()
        found = {}
        for number in reversed(steps):
            needed = self.reads[number] | later
            groups = []
            for group in reversed(self._moved(number, run)):
                if group in needed:
                    groups.append(group)
                    needed |= self._arguments[group]
            gone = [name for name, group in self._group_of.items() if group in needed and group not in later]
            again = sorted([each for group in groups for each in self._groups[group]])
            found[number] = tuple(again), frozenset(gone)
            later = needed - set(groups)
        return found

    def _moved(self, number: int, run: Set[int]) -> list[int]:
        """The groups that are computed again before a statement, and before the ones just ahead of it that do not run."""
        found: set[int] = set()
        for each in reversed([*self.reads][: [*self.reads].index(number) + 1]):
            if each != number and each in run:
                break
            found.update(self.again[each])
        return sorted(found)


def _arguments(statement: Statement) -> list[Any]:
    return values_in((statement.arrays, statement.statics))


def _can_repeat(statement: Statement) -> bool:
    return statement.is_row or isinstance(statement.op, DrawOp)


def _noting(statement: Statement) -> Statement:
    """A draw that also returns the state that its generator had; any other statement as it is."""
    if not isinstance(statement.op, DrawOp):
        return statement
    draw = statement.op.forward

    def noted() -> tuple[Any, Draws]:
        draws = Draws()
        with draws.recording():
            return draw(), draws

    return replace(statement, fused=Fused(noted, (DRAWS,)))


def _grouped(program: Program) -> tuple[list[list[int]], dict[str, int]]:
    """Groups of statements, see Note [Planned values], and by name of a value or residual the number of its group."""
    group_of_statement: list[int] = []
    groups: list[list[int]] = []
    by_owner: dict[int, int] = {}
    for number, statement in enumerate(program.statements):
        owners = [program.owners[value.name][0] for value in statement.outputs]
        group = next((by_owner[owner] for owner in owners if owner in by_owner), len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(number)
        group_of_statement.append(group)
        for owner in owners:
            by_owner.setdefault(owner, group)
    found: dict[str, int] = {}
    for number, statement in enumerate(program.statements):
        names = [value.name for value in statement.outputs]
        if statement.fused is not None and not isinstance(statement.op, DrawOp):
            names += [residual(number, each) for each in statement.fused.residuals]
        found.update(dict.fromkeys(names, group_of_statement[number]))
    return groups, found
