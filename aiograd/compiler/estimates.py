"""Estimated times of backwards, which decide where they run."""

from __future__ import annotations

from aiograd.compiler.program import Program, Statement
from aiograd.engine.placement import INLINE_NS

#: estimated nanoseconds of a statement beside its arithmetic; and of one on a device, which only starts work there
STATEMENT_NS = 300.0
START_NS = 20_000.0


def estimate(program: Program) -> float:
    """Estimated nanoseconds of the backward of a program; never too much for the loop where no statement by itself is."""
    costs = [statement_cost(statement) for statement in program.statements]
    total = sum(costs)
    return total if max(costs, default=0.0) > INLINE_NS else min(total, INLINE_NS)


def statement_cost(statement: Statement) -> float:
    """Estimated nanoseconds of the backward of a statement."""
    if statement.node is None:
        return 0.0
    return START_NS if statement.is_on_device else STATEMENT_NS + statement.cost
