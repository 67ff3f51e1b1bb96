"""Refuses schedules that cannot run, with the place and the reason.

Note [Checks]
    In this order, so that the first complaint is the plainest one:

    1. each row by itself: actions stand on the rank of their stage, nothing happens twice, B and I come after F, W after I, SEND after the action
       that makes its values; a stage with sharded parameters computes while they are gathered, and its gradients are reduced after its last
       backward;
    2. each stage: as many F as microbatches, as many I as W, as many backwards (one B, or one I with its W) as microbatches. A schedule
       without any backward is a forward-only schedule and is exempt from the latter;
    3. in a lowered schedule each transfer between ranks is there, at both ends, and no other;
    4. all rows together get to their ends: no two wait for each other.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from aiograd.errors import ScheduleError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.data import ScheduleData
from aiograd.pipeline.schedule.dependencies import Fact, carry_out, fact_of, facts_needed, transfer_after
from aiograd.pipeline.schedule.grid import format_grid

_K = ActionKind
_AFTER = {
    _K.B: (_K.F, "full backward (B)", "its forward (F)"),
    _K.I: (_K.F, "input backward (I)", "its forward (F)"),
    _K.W: (_K.I, "weight backward (W)", "its input backward (I)"),
    _K.SEND_F: (_K.F, "SEND_F", "the forward (F) whose outputs it sends"),
    _K.SEND_B: (_K.I, "SEND_B", "the backward (I or B) whose gradients it sends"),
}


def check_schedule(schedule: ScheduleData) -> None:
    """Raise a `ScheduleError` if the schedule cannot run; see Note [Checks]."""
    _Checker(schedule).check()


class _Checker:
    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule = schedule
        self.homes = schedule.stage_to_rank
        #: where each single action stands
        self.seen: dict[Action, tuple[int, int]] = {}

    def check(self) -> None:
        for rank, row in enumerate(self.schedule.ranks):
            if not self.schedule.stages_of(rank) and not any(row):
                raise ScheduleError(
                    f"rank {rank} of {self.schedule.num_ranks} has no stage: drop the rank, or give it the actions of a stage", rank=rank
                )
            parameters = _Parameters(self, rank)
            done: set[Fact] = set()
            for step, action in enumerate(row):
                if action is None:
                    continue
                for part in action.parts or (action,):
                    self.check_place(part, rank, step, done)
                    parameters.check(part, step)
                done.update(map(fact_of, action.parts or (action,)))
        self.check_counts()
        if self.schedule.is_lowered:
            self.check_transfers()
        self.check_progress()

    def fail(self, reason: str, rank: int, step: int, action: Action | None = None) -> NoReturn:
        stage, microbatch = (None, None) if action is None else (action.stage, action.microbatch)
        raise ScheduleError(
            f"rank {rank}, step {step}: {reason}\n\n{format_grid(self.schedule.ranks, (rank, step))}",
            rank=rank, step=step, stage=stage, microbatch=microbatch,
        )  # fmt: skip

    def check_place(self, part: Action, rank: int, step: int, done: set[Fact]) -> None:
        where = f"of stage {part.stage}" + ("" if part.microbatch is None else f", microbatch {part.microbatch}")
        if self.homes[part.stage] != rank:
            self.fail(f"{part} {where}, which is assigned to rank {self.homes[part.stage]}: a stage lives on one rank", rank, step, part)
        after = _AFTER.get(part.kind)
        if after is not None and (after[0], part.stage, part.microbatch) not in done:
            self.fail(f"{after[1]} {where} without {after[2]} in an earlier step", rank, step, part)
        if part.kind not in (_K.UNSHARD, _K.RESHARD):
            twin = part
            if part.kind in (_K.B, _K.I):
                other = Action(part.stage, _K.I if part.kind is _K.B else _K.B, part.microbatch)
                twin = other if other in self.seen else part
            if twin in self.seen:
                self.fail(f"{part} {where} repeats {twin} of step {self.seen[twin][1]}", rank, step, part)
            if part.kind is _K.W and Action(part.stage, _K.B, part.microbatch) in self.seen:
                self.fail(f"weight backward (W) {where} after a full backward (B), which includes it", rank, step, part)
        self.seen[part] = rank, step

    def check_counts(self) -> None:
        expected = self.schedule.num_microbatches
        counts = Counter((action.stage, action.kind) for action in self.seen)
        forward_only = self.schedule.is_forward_only
        for stage, rank in enumerate(self.homes):
            forwards, full, inputs, weights = (counts[stage, kind] for kind in (_K.F, _K.B, _K.I, _K.W))
            if forwards != expected:
                raise ScheduleError(f"stage {stage} has {forwards} forwards (F), expected {expected}: one per microbatch", rank=rank, stage=stage)
            if inputs != weights:
                raise ScheduleError(
                    f"stage {stage} has {inputs} input backwards (I) and {weights} weight backwards (W): each I needs its W", rank=rank, stage=stage
                )
            if not forward_only and full + inputs != expected:
                raise ScheduleError(
                    f"stage {stage} has {full + inputs} backwards (B={full}, I={inputs}, W={weights}), expected {expected}: one per microbatch",
                    rank=rank, stage=stage,
                )  # fmt: skip

    def check_transfers(self) -> None:
        sends = {send for part in self.seen if (send := transfer_after(part, self.homes)) is not None}
        expected = sends | {send.other_end for send in sends}
        for action, (rank, step) in self.seen.items():
            if (action.kind.is_send or action.kind.is_receive) and action not in expected:
                self.fail(f"{action} moves nothing between two ranks: no stage on another rank gives or needs it", rank, step, action)
        missing = min((action for action in expected if action not in self.seen), key=str, default=None)
        if missing is not None:
            raise ScheduleError(
                f"the lowered schedule lacks {missing}, the other end of {missing.other_end} between ranks {self.homes[missing.stage]} and "
                f"{self.homes[missing.other_end.stage]}; Schedule.lower adds what a compute-only schedule needs",
                rank=self.homes[missing.stage], stage=missing.stage, microbatch=missing.microbatch,
            )  # fmt: skip

    def check_progress(self) -> None:
        _, stuck = carry_out(self.schedule.ranks, lambda part: facts_needed(part, self.homes, self.schedule.is_lowered))
        if stuck:
            rank, step, _ = stuck[0]
            action = self.schedule.ranks[rank][step]
            waits = "; ".join(
                f"rank {rank} at step {step} ({self.schedule.ranks[rank][step]}) for {kind.value} of stage {stage}, microbatch {microbatch}"
                for rank, step, (kind, stage, microbatch) in stuck
            )
            self.fail(f"the ranks wait for each other forever: {waits}", rank, step, action)


class _Parameters:
    """Checks the actions of a row on the parameters of its stages: UNSHARD, RESHARD, REDUCE_GRAD."""

    def __init__(self, checker: _Checker, rank: int) -> None:
        self.checker = checker
        self.rank = rank
        row = [action for action in checker.schedule.ranks[rank] if action is not None]
        self.sharded = {action.stage for action in row if action.kind is _K.UNSHARD}
        self.gathered: set[int] = set()
        self.left = Counter(part.stage for action in row for part in action.computations if part.kind in (_K.B, _K.W))

    def check(self, part: Action, step: int) -> None:
        stage, kind = part.stage, part.kind
        if kind in (_K.B, _K.W):
            self.left[stage] -= 1
        if kind is _K.UNSHARD:
            if stage in self.gathered:
                self.checker.fail(f"{part}: the parameters of stage {stage} are gathered already", self.rank, step, part)
            self.gathered.add(stage)
        elif kind is _K.RESHARD:
            if stage not in self.gathered:
                self.checker.fail(f"{part}: the parameters of stage {stage} are not gathered at this point", self.rank, step, part)
            self.gathered.remove(stage)
        elif kind is _K.REDUCE_GRAD:
            if self.left[stage]:
                self.checker.fail(f"{part}: stage {stage} has {self.left[stage]} backwards still to come", self.rank, step, part)
        elif kind.is_compute and stage in self.sharded and stage not in self.gathered:
            self.checker.fail(f"{part}: the parameters of stage {stage} are not gathered at this point; UNSHARD them first", self.rank, step, part)
