"""Pipelines: stages of a model on several ranks, microbatches that pass through them, and schedules that say who does what when.

Schedules are pure data. Read `action` and `schedule` first; then:

======================================  =====================================================================================
`named`                                 the schedules of the literature
`layout`                                which rank a stage lives on
`validation`, `dependencies`            what makes a schedule possible
`lowering`, `liveness`, `ticks`         what moves between ranks, what is kept how long, how many steps it takes
======================================  =====================================================================================
"""

from __future__ import annotations

from aiograd.pipeline.action import Action as Action
from aiograd.pipeline.action import ActionKind as ActionKind
from aiograd.pipeline.layout import stage_layout as stage_layout
from aiograd.pipeline.liveness import SlotAssignment as SlotAssignment
from aiograd.pipeline.liveness import rank_slots as rank_slots
from aiograd.pipeline.schedule import Schedule as Schedule
from aiograd.pipeline.ticks import tick_count as tick_count
