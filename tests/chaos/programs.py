"""Random programs over several workers, and what their gradients are when everything runs in one process.

A program is data that travels as the argument of a call: what to compute, and which parts of it other workers compute. All numbers are small
integers in float64, so sums and products are exact in any order and a gradient is either right to the last bit or wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any

import aiograd as ag

#: elements of every tensor
SIZE = 3
#: parameters per worker
PARAMETERS = 2

Call = Callable[[str, list[Any], list[ag.Tensor]], Awaitable[list[ag.Tensor]]]


def parameters(worker: str) -> list[ag.Tensor]:
    """The leaves of a worker, the same each time."""
    random = Random(f"parameters:{worker}")
    return [ag.tensor([float(random.choice((1, 2, 3))) for _ in range(SIZE)], dtype=ag.float64, requires_grad=True) for _ in range(PARAMETERS)]


def draw(random: Random, workers: list[str], here: str, inputs: int, depth: int) -> list[Any]:
    """A program for the worker `here`: steps, each making more values, and which values it returns.

    Values are numbered: the inputs, then what the steps made.
    """
    steps: list[list[Any]] = []
    values = inputs
    for _ in range(random.randint(1, 4)):
        kind = random.choice(("parameter", "multiply", "add", "scale", "call", "call")) if depth else random.choice(("parameter", "multiply", "add"))
        if kind in ("multiply", "add") and values < 1:
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
                if not values:
                    continue
                steps.append(["scale", pick, random.choice((-1, 2))])
            case "call":
                peer = random.choice(workers)
                given = [random.randrange(values) for _ in range(random.randint(0, 2))] if values else []
                inner = draw(random, workers, peer, len(given), depth - 1)
                steps.append(["call", peer, given, inner, random.random() < 0.5])
                values += len(inner[1])
                continue
        values += 1
    if not values:
        steps.append(["parameter", 0])
        values = 1
    returned = sorted({random.randrange(values) for _ in range(random.randint(1, 2))})
    return [steps, returned]


async def execute(program: list[Any], inputs: list[ag.Tensor], leaves: list[ag.Tensor], call: Call, gather: Callable[..., Awaitable[list[Any]]]) -> list[Any]:
    """Run a program; `call` runs the parts that belong to other workers, neighbouring ones at the same time where the program says so."""
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
            case "call":
                together = [step]
                known = len(values)
                while step[4] and index < len(steps) and steps[index][0] == "call" and all(i < known for i in steps[index][2]):
                    together.append(steps[index])
                    index += 1
                results = await gather(*(call(peer, inner, [values[i] for i in given]) for _, peer, given, inner, _ in together))
                for result in results:
                    values.extend(result)
    return [values[i] for i in returned]


async def in_turn(*awaitables: Awaitable[Any]) -> list[Any]:
    """One after the other: what the reference does."""
    return [await awaitable for awaitable in awaitables]


async def reference(program: list[Any], driver: str, x: ag.Tensor, leaves: Mapping[str, list[ag.Tensor]]) -> ag.Tensor:
    """The loss, computed in one process from the leaves of all workers."""

    def caller() -> Call:
        async def call(peer: str, inner: list[Any], given: list[ag.Tensor]) -> list[ag.Tensor]:
            return await execute(inner, given, leaves[peer], call, in_turn)

        return call

    return total(await execute(program, [x], leaves[driver], caller(), in_turn))


def total(outputs: list[ag.Tensor]) -> ag.Tensor:
    """The loss of a program's outputs."""
    loss = outputs[0].sum()
    for output in outputs[1:]:
        loss = loss + output.sum()
    return loss
