"""Random programs over several workers, and what their gradients are when everything runs in one process.

A program is data that travels as the argument of a call: what to compute, and which parts of it other workers compute. All numbers are small
integers in float64, so sums and products are exact in any order and a gradient is either right to the last bit or wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from random import Random
from typing import Any, Protocol

import numpy as np

import aiograd as ag

#: elements of every tensor
SIZE = 3
#: parameters per worker
PARAMETERS = 2
#: steps that need nobody else
ALONE = ("parameter", "multiply", "add", "scale", "hook", "offload")


class Hands(Protocol):
    """Carries out the steps of a program that are not plain arithmetic."""

    async def call(self, peer: str, program: list[Any], given: list[ag.Tensor]) -> list[ag.Tensor]:
        """Run a program on another worker, or this one."""

    async def plain(self, peer: str, given: ag.Tensor, parameter: int) -> ag.Tensor:
        """Multiply by a parameter on another worker, in a function that is no coroutine."""

    async def offload(self, given: ag.Tensor) -> ag.Tensor:
        """Double a value on the executor."""

    def hook(self, value: ag.Tensor) -> None:
        """Let user code have a look at the gradient of a value."""

    async def together(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        """The results of what may run at the same time."""


def parameters(worker: str) -> list[ag.Tensor]:
    """The leaves of a worker, the same each time."""
    random = Random(f"parameters:{worker}")
    return [ag.tensor([float(random.choice((1, 2, 3))) for _ in range(SIZE)], dtype=ag.float64, requires_grad=True) for _ in range(PARAMETERS)]


def new_input() -> ag.Tensor:
    """The driver's input of a program."""
    return ag.tensor(np.array([1.0, 2.0, 3.0]), requires_grad=True)


def draw(random: Random, workers: list[str], inputs: int, depth: int) -> list[Any]:
    """A program: steps, each making more values, and which values it returns.

    Values are numbered: the inputs, then what the steps made. Some of what a program makes is not used.

    Args:
        workers: who may compute parts of it.
        inputs: how many values it is given.
        depth: how deep calls may be nested.
    """
    steps: list[list[Any]] = []
    values = inputs
    for _ in range(random.randint(1, 4)):
        kind = random.choice((*ALONE, "call", "call", "call", "call", "plain", "plain") if depth else ALONE)
        if not values and kind not in ("parameter", "call"):
            kind = "parameter"
        pick = random.randrange(values) if values else 0
        match kind:
            case "parameter":
                steps.append(["parameter", random.randrange(PARAMETERS)])
            case "multiply":
                steps.append(["multiply", pick, random.randrange(PARAMETERS)])
            case "add":
                steps.append(["add", pick, random.randrange(values)])
            case "scale":
                steps.append(["scale", pick, random.choice((-1, 2))])
            case "hook" | "offload":
                steps.append([kind, pick])
            case "plain":
                steps.append(["plain", random.choice(workers), pick, random.randrange(PARAMETERS)])
            case "call":
                peer = random.choice(workers)
                given = [random.randrange(values) for _ in range(random.randint(0, 2))] if values else []
                inner = draw(random, workers, len(given), depth - 1)
                steps.append(["call", peer, given, inner, random.random() < 0.5])
                values += len(inner[1]) - 1
        values += 1
    returned = sorted({random.randrange(values) for _ in range(random.randint(1, 2))})
    return [steps, returned]


def everywhere(driver: str, workers: list[str]) -> list[Any]:
    """A program in which every worker is called by the driver and by another worker, and every leaf gets a gradient; the driver is called too."""
    own = [[["multiply", 0, 0], ["multiply", 1, 1]], [2]]
    steps: list[list[Any]] = [["multiply", 0, 0]]
    for index, name in enumerate(workers):
        other = workers[(index + 1) % len(workers)]
        inner = [[["multiply", 0, 0], ["call", other, [1], own, False], ["call", driver, [2], own, False], ["multiply", 3, 1]], [4]]
        steps.append(["call", name, [1], inner, True])
    for index in range(len(workers)):
        steps.append(["add", 2 + index, 1 if not index else 1 + len(workers) + index])
    return [steps, [1 + 2 * len(workers)]]


async def execute(program: list[Any], inputs: list[ag.Tensor], leaves: list[ag.Tensor], hands: Hands) -> list[ag.Tensor]:
    """Run a program on the worker that has these leaves; neighbouring calls run at the same time where the program says so."""
    steps, returned = program
    values = list(inputs)
    index = 0
    while index < len(steps):
        step = steps[index]
        index += 1
        match step[0]:
            case "parameter":
                values.append(leaves[step[1]] * 1.0)
            case "multiply":
                values.append(values[step[1]] * leaves[step[2]])
            case "add":
                values.append(values[step[1]] + values[step[2]])
            case "scale":
                values.append(values[step[1]] * float(step[2]))
            case "hook":
                values.append(values[step[1]] * 1.0)
                hands.hook(values[-1])
            case "offload":
                values.append(await hands.offload(values[step[1]]))
            case "plain":
                values.append(await hands.plain(step[1], values[step[2]], step[3]))
            case "call":
                side_by_side = [step]
                known = len(values)
                while step[4] and index < len(steps) and steps[index][0] == "call" and all(i < known for i in steps[index][2]):
                    side_by_side.append(steps[index])
                    index += 1
                calls = [hands.call(peer, inner, [values[i] for i in given]) for _, peer, given, inner, _ in side_by_side]
                for result in await hands.together(calls):
                    values.extend(result)
    return [values[i] for i in returned]


def total(outputs: list[ag.Tensor]) -> ag.Tensor:
    """The loss of a program's outputs."""
    loss = outputs[0].sum()
    for output in outputs[1:]:
        loss = loss + output.sum()
    return loss


class OneProcess:
    """Carries out all steps right here, with the leaves of all workers: the reference."""

    def __init__(self, leaves: Mapping[str, list[ag.Tensor]]) -> None:
        self.leaves = leaves

    async def call(self, peer: str, program: list[Any], given: list[ag.Tensor]) -> list[ag.Tensor]:
        return await execute(program, given, self.leaves[peer], self)

    async def plain(self, peer: str, given: ag.Tensor, parameter: int) -> ag.Tensor:
        return given * self.leaves[peer][parameter]

    async def offload(self, given: ag.Tensor) -> ag.Tensor:
        return given * 2.0

    def hook(self, value: ag.Tensor) -> None:
        pass

    async def together(self, awaitables: list[Awaitable[Any]]) -> list[Any]:
        return [await awaitable for awaitable in awaitables]


Gradients = dict[str, list[np.ndarray[Any, Any] | None]]


async def reference(program: list[Any], driver: str, workers: list[str]) -> Gradients:
    """The gradients of a program that `driver` runs: of the leaves of each worker under its name, and of the input under ``"input"``.

    Computed in one process; None where a leaf has no part in the loss. Empty where nothing has.
    """
    leaves = {name: parameters(name) for name in {driver: None, **dict.fromkeys(workers)}}
    x = new_input()
    loss = total(await execute(program, [x], leaves[driver], OneProcess(leaves)))
    if loss.grad_fn is None:
        return {}
    wanted = [x, *(leaf for own in leaves.values() for leaf in own)]
    grads = [None if grad is None else grad.numpy() for grad in await ag.grad(loss, wanted, allow_unused=True)]
    found: Gradients = {"input": [grads.pop(0)]}
    for name, own in leaves.items():
        found[name] = [grads.pop(0) for _ in own]
    return found
