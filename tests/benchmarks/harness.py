"""How the benchmarks measure: peers side by side in one interleaved run, after their results were found equal.

Note [Interleaved]
    A machine that others use, or that changes its clock, is faster in one minute than in the next. So no side runs to its end before
    another starts: each round visits every side for a few steps, with a pause before it in which the threads of the one before (a
    spinning OpenMP team, say) go to sleep, and an untimed step that fills the caches. Minima say what the code can do, medians what it did; a
    ratio of minima is the one to compare with a target.

Note [Equal work]
    Sides are built from the same arrays. Before anything is timed, each side computes its values and gradients once and they are
    compared; a benchmark of a wrong result is an error. The garbage collector runs as it is on every side, and freeing the graph belongs
    to the step.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: the side that is measured against the others
OURS = "aiograd"
#: what torch and HIPS autograd are called in tables, with the module that must be installed
PEERS = {"torch": "torch", "autograd": "autograd"}


class DisagreementError(AssertionError):
    """Two sides of a benchmark do not compute the same."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to run.

    Attributes:
        tiny: sizes and counts that take a second or so: whether it runs, not how fast.
        peers: names of the peers to run beside aiograd.
    """

    tiny: bool = False
    peers: tuple[str, ...] = field(default_factory=lambda: installed_peers())

    def of(self, full: int, tiny: int) -> int:
        """A size or a count."""
        return tiny if self.tiny else full


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do a workload.

    Attributes:
        step: what is timed; awaited if it returns an awaitable.
        result: values and gradients, computed afresh; awaited likewise.
    """

    step: Callable[[], Any]
    result: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """The same work on several sides, `OURS` among them, and what ratio to torch is aimed at."""

    name: str
    sides: Mapping[str, Side]
    target: float | None = None
    beyond: float | None = None
    rtol: float = 1e-4
    atol: float = 1e-6


@dataclass(slots=True)
class Timing:
    """Seconds of every timed step of one side."""

    seconds: list[float] = field(default_factory=list)

    @property
    def minimum(self) -> float:
        """The fastest step."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The step in the middle."""
        return statistics.median(self.seconds)


@dataclass(slots=True)
class Table:
    """A titled table; cells are text."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Any) -> None:
        """Append a row."""
        self.rows.append([str(cell) for cell in cells])

    def text(self) -> str:
        """The table with aligned columns: the first to the left, the others to the right."""
        widths = [max(len(row[i]) for row in [list(self.columns), *self.rows]) for i in range(len(self.columns))]
        lines = [self.title, "-" * len(self.title)]
        for row in [list(self.columns), *self.rows]:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def installed_peers() -> tuple[str, ...]:
    """The peers that can be imported."""
    return tuple(name for name, module in PEERS.items() if importlib.util.find_spec(module) is not None)


def sides(settings: Settings, ours: Callable[[], Side], **peers: Callable[[], Side]) -> dict[str, Side]:
    """Our side and those of the peers that are to run, built only then."""
    built = {OURS: ours()}
    built.update({name: build() for name, build in peers.items() if name in settings.peers})
    return built


def training_side(forward_backward: Callable[[], Any], step: Callable[[], Any], parameters: Sequence[Any]) -> Side:
    """A side whose step trains; its result is the loss, the gradients, and the parameters after one step.

    Args:
        forward_backward: computes the loss and the gradients; may be a coroutine function, as `step` may.
        step: a whole training step.
        parameters: tensors of either library.
    """

    def copied(tensor: Any) -> np.ndarray[Any, Any]:
        return np.array(tensor.detach().numpy())

    async def result() -> list[np.ndarray[Any, Any]]:
        loss = await awaited(forward_backward())
        grads = [copied(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        await awaited(step())
        return [copied(loss), *grads, *map(copied, parameters)]

    return Side(step, result)


async def awaited(value: Any) -> Any:
    """A value, or what an awaitable gives."""
    return await value if inspect.isawaitable(value) else value


async def check_agreement(workload: Workload) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Compute every side's result and compare each with ours.

    Raises:
        DisagreementError
    """
    results = {name: [np.asarray(value) for value in await awaited(side.result())] for name, side in workload.sides.items()}
    ours = results[OURS]
    for i, value in enumerate(ours):
        if not np.isfinite(value).all():
            raise DisagreementError(f"{workload.name}: result {i} of {OURS} is not finite")
    for name, theirs in results.items():
        if len(theirs) != len(ours):
            raise DisagreementError(f"{workload.name}: {OURS} has {len(ours)} results and {name} {len(theirs)}")
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine.shape != other.shape:
                raise DisagreementError(f"{workload.name}: result {i} of {OURS} has shape {mine.shape}, of {name} {other.shape}")
            error = np.abs(mine - other).max(initial=0.0)
            scale = np.abs(other).max(initial=0.0)
            if not error <= workload.atol + workload.rtol * scale:
                raise DisagreementError(f"{workload.name}: result {i} of {OURS} and {name} differ by {error:.3g}, the largest value is {scale:.3g}")
    return results


async def interleave(
    steps: Mapping[str, Callable[[], Any]], *, rounds: int, repeats: int = 3, warm: int = 1, pause: float = 0.004
) -> dict[str, Timing]:
    """Time several sides in turn; see Note [Interleaved].

    Args:
        steps: what to time, by side; awaited if it returns an awaitable.
        rounds: how often each side gets its turn.
        repeats: timed steps per turn.
        warm: untimed steps before them.
        pause: seconds of silence before each turn.
    """
    clock = time.perf_counter
    timings = {name: Timing() for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            await asyncio.sleep(pause)
            for repeat in range(-warm, repeats):
                started = clock()
                value = step()
                if isinstance(value, Awaitable):
                    await value
                elapsed = clock() - started
                if repeat >= 0:
                    timings[name].seconds.append(elapsed)
    return timings


async def compare(
    title: str, workloads: Sequence[Workload], settings: Settings, *, rounds: int = 15, repeats: int = 3, pause: float = 0.004
) -> Table:
    """Check, time and tabulate workloads."""
    peers = [name for name in PEERS if any(name in workload.sides for workload in workloads)]
    columns = ["workload", "aiograd ms min/median", *(f"{name} ms" for name in peers)]
    columns += [f"× {name} min/median" for name in peers]
    table = Table(title, [*columns, "target × torch", "beyond", "verdict"])
    for workload in workloads:
        await check_agreement(workload)
        steps = {name: side.step for name, side in workload.sides.items()}
        if settings.tiny:
            timings = await interleave(steps, rounds=1, repeats=1, warm=0, pause=0.0)
        else:
            timings = await interleave(steps, rounds=rounds, repeats=repeats, pause=pause)
        ours = timings[OURS]
        ratios = [(ours.minimum / timings[name].minimum, ours.median / timings[name].median) if name in timings else None for name in peers]
        cells = [workload.name, milliseconds(ours), *(milliseconds(timings[name]) if name in timings else "" for name in peers)]
        cells += ["" if ratio is None else f"{ratio[0]:.2f}/{ratio[1]:.2f}" for ratio in ratios]
        torch_ratio = ours.minimum / timings["torch"].minimum if "torch" in timings and not settings.tiny else None
        table.add(*cells, *goal_cells(torch_ratio, workload.target, workload.beyond))
    return table


def milliseconds(timing: Timing) -> str:
    """``minimum/median`` in milliseconds."""
    return f"{timing.minimum * 1e3:.3g}/{timing.median * 1e3:.3g}"


def goal_cells(value: float | None, target: float | None, beyond: float | None, *, higher: bool = False) -> list[str]:
    """Target, beyond and verdict as cells; smaller is better unless `higher`."""

    def reached(goal: float | None) -> bool:
        return value is not None and goal is not None and (value >= goal if higher else value <= goal)

    sign = "≥" if higher else "≤"
    verdict = "" if value is None or target is None else "beyond" if reached(beyond) else "met" if reached(target) else "missed"
    return ["" if target is None else f"{sign} {target:g}", "" if beyond is None else f"{beyond:g}", verdict]


def machine() -> str:
    """One line on the machine and the versions."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    parts = [f"{model}, {cores} cores", f"Python {platform.python_version()}", f"numpy {np.__version__}"]
    parts.append(f"BLAS {blas.get('name')} {blas.get('version')}")
    for package in ("torch", "autograd", "numba", "uvloop", "aiohttp"):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)


def threads(count: int) -> Any:
    """A context manager: BLAS with `count` threads, and torch as well where it is installed."""
    return _Threads(count)


class _Threads:
    def __init__(self, count: int) -> None:
        self._count = count
        self._blas: Any = None
        self._torch: int | None = None

    def __enter__(self) -> None:
        if importlib.util.find_spec("threadpoolctl") is not None:
            from threadpoolctl import threadpool_limits

            self._blas = threadpool_limits(self._count, user_api="blas")
        if importlib.util.find_spec("torch") is not None:
            import torch

            self._torch = torch.get_num_threads()
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._blas is not None:
            self._blas.restore_original_limits()
        if self._torch is not None:
            import torch

            torch.set_num_threads(self._torch)
