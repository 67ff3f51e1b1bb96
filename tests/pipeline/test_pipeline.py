"""Pipelines on one loop: what a step and an evaluation give, compared with the same microbatches one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import pipeline
from aiograd.errors import ArgumentError, ArgumentTypeError, ModeError, PipelineError
from aiograd.pipeline import Pipeline, Schedule, Stage, make_schedule
from tests.pipeline.models import (
    LATE_WEIGHTS,
    ONE_FORWARD_ONE_BACKWARD,
    SIZE,
    TURN,
    ZERO_BUBBLE,
    blocks,
    chunks,
    data,
    gradients,
    mean_square,
    schedule,
    serial,
    values,
)

NAMED = [
    ("GPipe", 3, 4, 1),
    ("1F1B", 3, 4, 1),
    ("ZB-H1", 3, 4, 1),
    ("ZB-H2", 3, 5, 1),
    ("Interleaved1F1B", 2, 4, 2),
    ("LoopedBFS", 2, 3, 2),
    ("InterleavedZeroBubble", 2, 4, 2),
    ("ZBVZeroBubble", 2, 4, 2),
    ("DualPipeV", 2, 4, 2),
    ("1F1B", 1, 3, 1),
    ("GPipe", 4, 2, 1),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "per_rank"), NAMED)
async def test_every_named_schedule_gives_the_gradients_of_the_serial_run(name: str, ranks: int, microbatches: int, per_rank: int) -> None:
    count = ranks * per_rank
    x, target = data(2 * microbatches + 1)
    alone, cut = blocks(count), blocks(count)
    losses = await serial(alone, microbatches, x, target)
    pipe = Pipeline(cut, make_schedule(name, ranks, microbatches, per_rank), loss_fn=mean_square)
    assert values(await pipe.step(x, target)) == losses
    assert gradients(cut) == gradients(alone)
