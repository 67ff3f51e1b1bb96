"""Check gradients to the last bit.

Note [The oracle]
    Each pass of a context is the same graph, scaled by its own power of two. A worker's gradients must therefore be the reference gradient
    times a sum of distinct powers: those of the passes that were committed, and none of those that failed. A wrong factor names the pass
    that was lost or counted twice. A pass whose outcome was reported as unknown may be in or out on the workers that were named, and
    nowhere else.

Note [When the initiator dies]
    Nobody reports the outcome of a pass whose initiator was killed. Then the workers that have decided must agree: all in or all out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag
from aiograd.distributed.autograd.context import Context
from tests.chaos.hosts import Host, World
from tests.chaos.programs import Gradients

#: bits between the powers of two passes, so that up to so many doublings of one cannot be mistaken for another
GAP = 8


def power(number: int) -> int:
    """The factor of pass `number` of a context."""
    return 1 << GAP * number


class Book:
    """The passes of one context, and what became of them.

    Args:
        world: the run.
        host: the driver.
        ctx: its view of the context.
        x: the input, a leaf of the driver.
        want: the reference gradients.
        held: who was there when the context was opened; who came later knows nothing of what was before.
    """

    def __init__(self, world: World, host: Host, ctx: Context, x: ag.Tensor, want: Gradients, held: dict[str, Host]) -> None:
        self.world = world
        self.host = host
        self.key = ctx.key
        self.principal = ctx.principal
        self.id = ctx.id
        self.x = x
        self.want = want
        self.held = held
        #: sum of the powers of passes that are in, everywhere
        self.committed = 0
        #: sums of the powers of passes that may be in or out, by worker
        self.doubtful = dict.fromkeys(held, 0)
        #: of passes that run
        self.running = 0

    def begin(self, number: int) -> None:
        """A pass begins."""
        self.running |= power(number)

    def end(self, number: int, *, is_in: bool, doubtful: tuple[str, ...] = ()) -> None:
        """A pass is over: in (on all but the doubtful) or out."""
        self.running &= ~power(number)
        if is_in:
            self.committed |= power(number)
            for name in doubtful:
                if name in self.held:  # else it came later, and nobody looks at what it has
                    self.doubtful[name] |= power(number)

    def check(self) -> None:
        """Check the gradients on every worker. No pass may be running. See Note [The oracle]."""
        expect = self.world.notes.expect
        for name, host in self.held.items():
            if self.world.hosts.get(name) is not host:
                continue  # it died, and its successor has nothing of this context
            maybe = self.doubtful[name]
            certain = self.committed & ~maybe
            context = host.find(self.key, self.principal)
            if context is None and any(each.is_closing for each in self.held.values()):
                continue  # a worker that closes releases its contexts, and on others those that it has opened there: whoever uses them is told
            for where, leaf, expected in self._leaves(name, host):
                expect(leaf.grad is None, f"{where}: .grad was touched")
                grad = None if context is None else _array(context.grads.get(leaf))
                factor = factor_of(grad, expected)
                if factor is None or (factor >= 0 and factor & ~maybe == certain and not factor & ~(certain | maybe)):
                    continue
                expect(
                    False,
                    f"{where} in {self.id} is {grad}, expected {expected} times {certain}{f' or more, out of {maybe}' if maybe else ''}"
                    f"{'' if context is not None else '; the worker does not know the context any more'}",
                )

    def check_orphan(self) -> None:
        """The driver was killed while a pass ran. See Note [When the initiator dies]."""
        found: dict[int, str] = {}
        for name, host in self.held.items():
            if host is self.host or self.world.hosts.get(name) is not host:
                continue
            context = host.find(self.key, self.principal)
            if context is None or context.participants or context.in_doubt:
                continue  # undecided, or reported to be so
            for where, leaf, expected in self._leaves(name, host):
                factor = factor_of(_array(context.grads.get(leaf)), expected)
                if factor is not None:
                    decided = factor & self.running & ~self.doubtful[name] if factor >= 0 else -1
                    others = ", ".join(f"{decision} on {others}" for decision, others in found.items())
                    self.world.notes.expect(not found or decided in found, f"{where} in {self.id}: {decided} of {self.running} is in, and {others}")
                    found.setdefault(decided, where)

    def _leaves(self, name: str, host: Host) -> list[tuple[str, ag.Tensor, Any]]:
        leaves = [(f"gradient {i} on {name}", leaf, self.want[name][i]) for i, leaf in enumerate(host.served.leaves)]
        if host is self.host:
            leaves.append((f"gradient of the input on {name}", self.x, self.want["input"][0]))
        return leaves


def _array(grad: Any) -> Any:
    return None if grad is None else grad.detach().numpy()


def factor_of(grad: Any, expected: Any) -> int | None:
    """The factor by which `expected` has been multiplied; None where any would fit, -1 where none does."""
    if expected is None or not expected.any():
        return None if grad is None or not np.any(grad) else -1
    if grad is None:
        return 0
    nonzero = expected != 0
    factor = grad[nonzero][0] / expected[nonzero][0]
    return int(factor) if factor == int(factor) and factor >= 0 and np.array_equal(grad, expected * factor) else -1
