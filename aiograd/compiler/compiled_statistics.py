"""Options and figures of compiled functions."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

#: sizes of a signature that have programs, with ``dynamic``
SIZES = 64


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of `compile` beside the function."""

    on_break: str
    max_signatures: int
    tier: str
    dynamic: bool = False
    memory_budget: float | None = None

    @property
    def most_programs(self) -> int:
        """How many programs are kept; with `dynamic` one for each of so many sizes of a signature."""
        return self.max_signatures * (SIZES if self.dynamic else 1)


@dataclass(frozen=True)
class CompiledStatistics:
    """Figures of a compiled function.

    Attributes:
        signatures: the number of signatures with a program.
        recordings: the number of recorded calls.
        runs: the number of calls that ran a program.
        eager: the number of calls that ran the function itself and were not recorded.
        breaks: the number of signatures that have no program and run eagerly.
        reasons: the reasons of breaks, by the text of the signature.
        recording_seconds: the duration of all recordings, with the time they waited and the making of the programs' code.
        arena_bytes: bytes of the memory that the programs compute in: arenas of runs with a live graph, and arenas kept for later runs.
        native_runs: the number of calls that ran native functions.
        native_programs: the number of signatures with a program that runs native functions.
        compile_seconds: the processor time that making native functions took, of forwards and backwards.
        cache_hits: the number of native functions with machine code that was there already, in memory or on disk.
    """

    signatures: int
    recordings: int
    runs: int
    eager: int
    breaks: int
    reasons: dict[str, str]
    recording_seconds: float
    arena_bytes: int
    native_runs: int = 0
    native_programs: int = 0
    compile_seconds: float = 0.0
    cache_hits: int = 0


@dataclass(frozen=True)
class Figures:
    """Figures that add up over programs; see `CompiledStatistics`."""

    runs: int = 0
    native_runs: int = 0
    compile_seconds: float = 0.0
    cache_hits: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*[mine + yours for mine, yours in zip(astuple(self), astuple(other), strict=True)])


def figures_of(code: Any) -> Figures:
    """The figures of a `ProgramCode` or `StepCode`. A run of a step is native if one of its parts is."""
    reports = [part.native.report for part in code.numeric if part.native is not None]
    reports += [update.report for updates in code.program.updates.values() for update in updates]
    before = [part.runs - part.native.runs_before for part in code.numeric if part.native is not None and part.native.runs_before is not None]
    hits = sum([text.was_kept for report in reports for text in report.parts.texts])
    return Figures(code.runs, max(before, default=0), sum([report.seconds for report in reports]), hits)
