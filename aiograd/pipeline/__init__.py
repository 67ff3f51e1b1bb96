"""Pipelines: stages of a model on several ranks, microbatches that pass through them, and schedules that say who does what when.

Schedules are pure data. Read `action` and `schedule` first; then:

======================================  =====================================================================================
`backward`, `microbatch`                the backward pass of a stage, whole or in two halves; batches in pieces
`catalog`, `named`                      schedules by name, and those of the literature
`layout`                                which rank a stage lives on
`validation`, `dependencies`            what makes a schedule possible
`costs`, `simulation`, `timeline`       when each action would start and end, what that costs, and pictures of it
`search`                                a schedule for given costs and memory
`lowering`, `liveness`, `ticks`         what moves between ranks, what is kept how long, how many steps it takes
`stage`, `stage_run`, `parcel`          what a stage is, what it keeps of a microbatch, and what it hands to the next
`plan`, `rank`, `staging`               a schedule made ready, carried out row by row, and its gradients on their way into ``grad``
`run`                                   all that waits on an event loop: pipelines, in one process and over workers
======================================  =====================================================================================
"""

from __future__ import annotations

from aiograd.engine.halves import ParameterGroup as ParameterGroup
from aiograd.pipeline.action import Action as Action
from aiograd.pipeline.action import ActionKind as ActionKind
from aiograd.pipeline.backward import stage_backward as stage_backward
from aiograd.pipeline.backward import stage_backward_input as stage_backward_input
from aiograd.pipeline.backward import stage_backward_weight as stage_backward_weight
from aiograd.pipeline.catalog import make_schedule as make_schedule
from aiograd.pipeline.costs import Costs as Costs
from aiograd.pipeline.layout import stage_layout as stage_layout
from aiograd.pipeline.liveness import SlotAssignment as SlotAssignment
from aiograd.pipeline.liveness import rank_slots as rank_slots
from aiograd.pipeline.microbatch import REPLICATE as REPLICATE
from aiograd.pipeline.microbatch import Reduce as Reduce
from aiograd.pipeline.microbatch import Split as Split
from aiograd.pipeline.microbatch import merge_microbatches as merge_microbatches
from aiograd.pipeline.microbatch import split_microbatches as split_microbatches
from aiograd.pipeline.run import Pipeline as Pipeline
from aiograd.pipeline.schedule import Schedule as Schedule
from aiograd.pipeline.simulation import simulate as simulate
from aiograd.pipeline.stage import Stage as Stage
from aiograd.pipeline.step_random import StepRandom as StepRandom
from aiograd.pipeline.ticks import tick_count as tick_count
from aiograd.pipeline.timeline import Timeline as Timeline
from aiograd.pipeline.timeline import TimelineEvent as TimelineEvent
