"""Pipelines: stages of a model on several ranks, microbatches that pass through them, and schedules with the actions of each rank in order.

============================  =============================================================================================
`schedule`                    the actions of each rank, as data: made by name or searched for, checked, timed, drawn
`step`                        one step in one process: stages, messages between them, sums of gradients
`run`                         all that waits on an event loop: pipelines, in one process and over workers
`backward`, `tree`            the backward pass of a stage, whole or in two halves, for code that runs stages by itself
`microbatch`                  batches in pieces
============================  =============================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.engine.split_backward import ParameterGroup as ParameterGroup
from aiograd.pipeline.backward import stage_backward as stage_backward
from aiograd.pipeline.backward import stage_backward_input as stage_backward_input
from aiograd.pipeline.backward import stage_backward_weight as stage_backward_weight
from aiograd.pipeline.microbatch import REPLICATE as REPLICATE
from aiograd.pipeline.microbatch import Reduce as Reduce
from aiograd.pipeline.microbatch import Split as Split
from aiograd.pipeline.microbatch import merge_microbatches as merge_microbatches
from aiograd.pipeline.microbatch import split_microbatches as split_microbatches
from aiograd.pipeline.run import Pipeline as Pipeline
from aiograd.pipeline.schedule.absorption import AbsorptionPlan as AbsorptionPlan
from aiograd.pipeline.schedule.absorption import absorb as absorb
from aiograd.pipeline.schedule.action import Action as Action
from aiograd.pipeline.schedule.action import ActionKind as ActionKind
from aiograd.pipeline.schedule.catalog import make_schedule as make_schedule
from aiograd.pipeline.schedule.costs import Costs as Costs
from aiograd.pipeline.schedule.layout import stage_layout as stage_layout
from aiograd.pipeline.schedule.liveness import SlotAssignment as SlotAssignment
from aiograd.pipeline.schedule.liveness import rank_slots as rank_slots
from aiograd.pipeline.schedule.schedule import Schedule as Schedule
from aiograd.pipeline.schedule.simulation import simulate as simulate
from aiograd.pipeline.schedule.ticks import tick_count as tick_count
from aiograd.pipeline.schedule.timeline.data import TimelineEvent as TimelineEvent
from aiograd.pipeline.schedule.timeline.timeline import Timeline as Timeline
from aiograd.pipeline.step.stage import Stage as Stage
from aiograd.pipeline.step.step_random import StepRandom as StepRandom
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)
