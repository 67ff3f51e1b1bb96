"""Makes schedules: by the name of one of the literature, or searched for given costs."""

from __future__ import annotations

from aiograd.pipeline.named import build_named
from aiograd.pipeline.schedule import Schedule


def make_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    return build_named(name, ranks, microbatches, stages_per_rank)
