"""Tables of what clusters of many workers cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.scale.growth import Growth
from tests.scale.training import Figures


def _table(title: str, rows: Sequence[tuple[str, Sequence[Any]]]) -> str:
    lines = [f"## {title}", ""]
    for index, (name, values) in enumerate(rows):
        lines.append(f"| {name} | {' | '.join(map(str, values))} |")
        if index == 0:
            lines.append("|---" * (1 + len(values)) + "|")
    return "\n".join(lines) + "\n"


def training_table(runs: Sequence[Figures]) -> str:
    """The table of the cost of training."""
    first = runs[0].size
    steps = [len(run.losses) for run in runs]
    workers = first.stages * first.replicas
    rows: list[tuple[str, Sequence[Any]]] = [
        ("", ["undisturbed" if not run.size.churn else f"a worker lost every {run.size.churn:g} s" for run in runs]),
        ("workers that joined", [run.size.workers for run in runs]),
        ("seconds until all had joined", [f"{run.joined_in:.2f}" for run in runs]),
        ("workers lost", [run.lost for run in runs]),
        ("steps committed", steps),
        ("seconds per step", [f"{run.seconds / count:.2f}" for run, count in zip(runs, steps, strict=True)]),
        ("slowest step, seconds", [f"{max(run.times):.2f}" for run in runs]),
        ("workers replaced", [run.counts["replaced"] for run in runs]),
        ("steps given up and taken again", [run.counts["given up"] for run in runs]),
        ("steps that a lost worker did not confirm", [run.counts["unconfirmed"] for run in runs]),
        ("kB sent per worker and step", [f"{run.bytes_sent / count / workers / 1e3:.1f}" for run, count in zip(runs, steps, strict=True)]),
        ("messages of the driver per step", [f"{run.driver_frames / count:.0f}" for run, count in zip(runs, steps, strict=True)]),
        ("kB sent by the driver per step", [f"{run.driver_bytes / count / 1e3:.0f}" for run, count in zip(runs, steps, strict=True)]),
        ("connections of the driver", [run.driver_connections for run in runs]),
        ("connections of a worker, mean and most", [f"{run.mean_connections:.1f}, {run.most_connections}" for run in runs]),
        ("loss in the first and the last step", [f"{run.losses[0]:.4f}, {run.losses[-1]:.4f}" for run in runs]),
        ("processor seconds of the simulation, real", [f"{run.processor:.0f}" for run in runs]),
        ("memory of the simulation, MiB", [f"{run.memory:.0f}" for run in runs]),
    ]
    return _table(f"{first.stages} stages in {first.replicas} replicas", rows)


def growth_table(found: Sequence[Growth]) -> str:
    """The table of the cost of more workers."""
    rows: list[tuple[str, Sequence[Any]]] = [("workers", [each.workers for each in found])]
    rows += [(name, [each.figures[name] for each in found]) for name in found[0].figures]
    return _table("One driver and more and more workers", rows)
