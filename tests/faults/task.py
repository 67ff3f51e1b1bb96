"""The work that all systems do: the same network, samples, order of samples and time a step. It needs numpy and nothing of this project.

Positions count all samples that are ever read, in order: step k reads the positions from k * BATCH on, and part i of n of them is the i-th of n
runs of equal length. The sample at a position is the row ``position % ROWS`` of the data.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

#: of the network: inputs, hidden, outputs
SIZES = (64, 128, 10)
ROWS, BATCH, SEED, LR = 4096, 128, 7, 0.05
#: a hash of the weights is taken in each step that this divides
SEEN = 10


def data() -> tuple[Any, Any]:
    """Inputs, float32, (ROWS, 64), and classes, int64, (ROWS,)."""
    generator = np.random.default_rng(SEED)
    inputs = generator.standard_normal((ROWS, SIZES[0]), dtype=np.float32)
    return inputs, (inputs @ generator.standard_normal((SIZES[0], SIZES[-1]), dtype=np.float32)).argmax(axis=1).astype(np.int64)


def weights() -> list[Any]:
    """The weights and biases that training begins with, float32; a weight is (outputs, inputs)."""
    generator = np.random.default_rng(SEED + 1)
    found = []
    for inputs, outputs in itertools.pairwise(SIZES):
        bound = 1 / inputs**0.5
        found += [generator.uniform(-bound, bound, shape).astype(np.float32) for shape in ((outputs, inputs), (outputs,))]
    return found


def rows(first: int, count: int) -> Any:
    """The rows of the data at these positions."""
    return np.arange(first, first + count) % ROWS


def share(step: int, part: int, parts: int) -> tuple[int, int]:
    """The first position and the count of a part of a step."""
    begin, end = BATCH * part // parts, BATCH * (part + 1) // parts
    return step * BATCH + begin, end - begin


def bits(arrays: Iterable[Any]) -> str:
    """A hash of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


class Lines:
    """The file of a run, to which each training process adds lines; a line is written in one call, so lines do not mix.

    Args:
        path: of the file.
        who: the name of this process.
    """

    def __init__(self, path: str, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._who = who

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line."""
        fields.setdefault("pid", os.getpid())
        fields.setdefault("who", self._who)
        line = {"t": time.monotonic(), "kind": kind, **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def step(self, began: float, step: int, first: int, count: int, weights: Iterable[Any] = ()) -> None:
        """Add the line of a committed step, with a hash of the weights if there are any."""
        arrays = list(weights)
        self.write("step", began=began, step=step, first=first, count=count, bits=bits(arrays) if arrays else "")

    def runs(self, who: str, pid: int) -> None:
        """Add the line of a process that takes part from now on: faults may strike it."""
        self.write("runs", who=who, pid=pid)


def options(description: str) -> argparse.Namespace:
    """The command line of each system's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--lines", required=True, help="the file that lines are added to")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0, help="of this process, where a system has a process for each")
    parser.add_argument("--host", default="127.0.0.1", help="address of this process")
    parser.add_argument("--meet", default="", help="host and port at which the processes of a system find each other")
    parser.add_argument("--work", type=float, default=0.05, help="seconds that a replica sleeps in each step, as work")
    parser.add_argument("--on", default="local", help="kind of cluster, where a system has several")
    parser.add_argument("--join", type=float, default=0.0, help="seconds after which one more replica joins; 0: none")
    return parser.parse_args()
