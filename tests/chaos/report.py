"""The table at the end of a chaos run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.batches import Piece
from tests.chaos.cells import FAULTS, POINTS, Cell
from tests.chaos.coverage import Coverage, names_of
from tests.chaos.ledger import Ledger, ratio


@dataclass
class Report:
    """Counts, and failures. Durations are counts under ``time: what: milliseconds``."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

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
        yield "losses absorbed      " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("absorbing: ", counts))) or "none")
        yield "local steps          " + (", ".join(f"{name} {count:,}" for name, count in sorted(_under("local steps: ", counts))) or "none")
        states = Coverage.of(counts)
        yield f"states met by faults {sum(map(bool, states.counts.values()))} cells; not yet: {names_of(states.unseen)}"
        yield f"contributions lost or doubled   {sum('gradient' in failure and 'expected' in failure for failure in self.failures)}"
        yield f"hangs                {wrong.count('did not end within') + wrong.count('DeadlockError') + wrong.count('a hang')}"
        yield f"leaks                {wrong.count('left over') + wrong.count('left behind')}"
        durations: dict[str, list[float]] = {}
        for name, count in _under("time: ", counts):
            what, _, milliseconds = name.rpartition(": ")
            durations.setdefault(what, []).extend([float(milliseconds)] * count)
        for what, times in durations.items():
            p50, p99, most = (f"{each:7.1f} ms" for each in (_at(times, 0.5), _at(times, 0.99), max(times)))
            yield f"{what:<28} p50 {p50}   p99 {p99}   max {most}   of {len(times)}"
        yield f"failures             {len(self.failures)}"


def cell_name(cell: Cell) -> str:
    """The name of a cell among counts."""
    return f"cell: {cell.point} × {cell.fault}"


def cell_table(counts: Counter[str]) -> Iterable[str]:
    """How often each fault met each point."""
    width = max(map(len, POINTS))
    yield " ".join((" " * width, *FAULTS))
    for point in POINTS:
        yield " ".join((point.ljust(width), *(str(counts[cell_name(Cell(point, fault))]).rjust(len(fault)) for fault in FAULTS)))


def judge_states(report: Report, counts: Mapping[str, int], *, is_whole: bool) -> None:
    """See that no fault met a state of a transaction in which it cannot strike; in a run that `is_whole`, also that all others were met.

    The table of a whole run is printed.
    """
    coverage = Coverage.of(counts)
    if coverage.contradictions:
        report.fail(f"states that no fault can meet, see IMPOSSIBLE in tests/chaos/coverage.py, were met: {names_of(coverage.contradictions)}")
    if is_whole:
        print(*coverage.lines(), sep="\n")
        if coverage.unseen:
            report.fail(f"no fault has met these states: {names_of(coverage.unseen)}")


def write_report(ledger: Ledger, planned: Mapping[str, Sequence[Piece]]) -> None:
    """Write ``report.json`` and ``report.md`` beside the ledger: figures by part, and failures with the commands that repeat them."""
    parts = {}
    for part, pieces in planned.items():
        names = {piece.part for piece in pieces}
        lines = [line for line in ledger.lines if line["piece"][0] in names]
        parts[part] = {
            "pieces": len(pieces), "left": len(ledger.todo(pieces)), "runs": sum(line["runs"] for line in lines),
            "virtual": sum(line["virtual"] for line in lines), "real": sum(line["real"] for line in lines), "ratio": ratio(lines),
            "failures": sum(len(line["failures"]) for line in lines),
        }  # fmt: skip
    folder = ledger.path.parent
    states = Coverage.of(ledger.coverage)
    whole = {
        "commit": ledger.commit, "runs": ledger.runs, "ratio": ledger.ratio, "parts": parts, "failures": ledger.failures,
        "states": {name: count for name, count in sorted(states.named().items()) if count},
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    rows = ["| part | runs | pieces left | virtual s | real s | virtual / real | failures |", "|---|---|---|---|---|---|---|"]
    for part, figures in parts.items():
        rows.append(
            f"| {part} | {figures['runs']:,} | {figures['left']} of {figures['pieces']} | {figures['virtual']:,.0f} | {figures['real']:,.0f} | "
            f"{figures['ratio']:,.0f} | {figures['failures']} |"
        )
    failures = "\n".join(f"- {failure}" for failure in ledger.failures) or "none"
    text = f"# Release checks of {ledger.commit or 'an unknown commit'}\n\n" + "\n".join(rows) + f"\n\nFailures: {failures}\n"
    text += "\nHow often each state of a transaction was current when a fault struck:\n\n```\n" + "\n".join(states.lines()) + "\n```\n"
    (folder / "report.md").write_text(text, encoding="utf-8")


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
