"""The table at the end of a chaos run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.cells import FAULTS, POINTS, Cell


@dataclass
class Report:
    """Counts of runs, failures, and durations."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        """Something was not as promised; said at once, too."""
        self.failures.append(what)
        print(f"FAILED  {what}", flush=True)

    def lines(self) -> Iterable[str]:
        """The summary."""
        counts = self.counts
        wrong = " ".join(self.failures)
        yield "faults injected      " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("fault: ", counts))) or "none")
        yield "trouble with hosts   " + (", ".join(f"{name} {count:,}" for name, count in sorted(_troubles(counts).items())) or "none")
        yield "jobs disturbed       " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("job: ", counts))) or "none")
        yield "proxies              " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("proxy: ", counts))) or "none")
        passes = dict(_under("backward ", counts))
        committed = sum(count for outcome, count in passes.items() if "committed" in outcome)
        others = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(passes.items()) if outcome != "committed")
        yield f"passes committed     {committed:,} of {sum(passes.values()):,} ({others})"
        yield "steps of replicas    " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("replicas: ", counts))) or "none")
        yield "local steps          " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("local steps: ", counts))) or "none")
        yield f"contributions lost or doubled   {sum('gradient' in failure and 'expected' in failure for failure in self.failures)}"
        yield f"hangs                {wrong.count('did not end within') + wrong.count('DeadlockError') + wrong.count('a hang')}"
        yield f"leaks                {wrong.count('left over') + wrong.count('left behind')}"
        for what, times in self.times.items():
            p50, p99, most = (f"{seconds * 1e3:7.1f} ms" for seconds in (_at(times, 0.5), _at(times, 0.99), max(times)))
            yield f"{what:<28} p50 {p50}   p99 {p99}   max {most}   of {len(times)}"
        yield f"failures             {len(self.failures)}"


def cell_table(hits: Counter[Cell]) -> Iterable[str]:
    """How often each fault met each point."""
    width = max(map(len, POINTS))
    yield " ".join((" " * width, *FAULTS))
    for point in POINTS:
        yield " ".join((point.ljust(width), *(str(hits[Cell(point, fault)]).rjust(len(fault)) for fault in FAULTS)))


def _at(times: Sequence[float], part: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _under(prefix: str, counts: Counter[str]) -> list[tuple[str, int]]:
    return [(name.removeprefix(prefix), count) for name, count in counts.items() if name.startswith(prefix)]


def _troubles(counts: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in _under("trouble: ", counts):
        found["kill at a point" if " at " in name else name] += count
    return found
