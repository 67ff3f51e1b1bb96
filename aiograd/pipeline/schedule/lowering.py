"""Passes over schedules: joins I and W, and adds the transfers between the computations and the actions on parameters around them.

Each pass takes rows and returns rows; `Schedule.merge` and `Schedule.lower` make schedules of them.

Note [Order of transfers]
    `add_transfers` carries the schedule out, one action per rank and round, ranks in order. When an action is done that another rank needs, SEND goes
    right after it and RECV behind the receiver's actions so far. So there is one order of all actions in which SEND and RECV of each transfer are
    neighbours, and the rows run to their end even where a SEND returns only when the other side receives.

    `defer_receives` moves each RECV later, never past its consumer, so that waiting for it holds nothing else up. That keeps an order in
    which each SEND precedes its RECV: enough where a SEND hands its values over and returns, as it does here, but not where both ends take
    part in a transfer at the same time. Between those two, the lower rank of a pair posts its receives before it sends: its
    RECVs from that peer are not moved past a SEND to that peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

from aiograd.errors import ScheduleError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.dependencies import carry_out, facts_needed, transfer_after
from aiograd.pipeline.schedule.grid import format_grid

Rows: TypeAlias = Sequence[Sequence[Action | None]]

#: the number of stages with gathered parameters on a rank: one in forward, one in backward, one on its way
ACTIVE_STAGES: Final = 3

_K = ActionKind
_RECEIVED_FOR = {_K.F: _K.RECV_F, _K.I: _K.RECV_B, _K.B: _K.RECV_B}


def merge_backwards(row: Sequence[Action | None]) -> list[Action | None]:
    """I and W of one stage and microbatch that follow each other directly in the row of a rank, idle cells aside, become one B.

    A full backward is cheaper than its halves. Idle cells between the two go away, others stay.
    """
    merged: list[Action | None] = []
    last = -1  # position in `merged` of the last action that is not idle
    for action in row:
        if action is not None:
            before = merged[last] if last >= 0 else None
            if action.kind is _K.W and before == Action(action.stage, _K.I, action.microbatch):
                merged[last:] = [Action(action.stage, _K.B, action.microbatch)]
                continue
            last = len(merged)
        merged.append(action)
    return merged


def lower_rows(
    rows: Rows, stage_to_rank: Sequence[int], microbatches: int, *, defer: bool, unshard: bool, reduce_gradients: bool
) -> list[list[Action | None]]:
    """See `Schedule.lower`."""
    if unshard:
        rows = [add_unshard(row) for row in rows]
    if reduce_gradients:
        rows = [add_reduce_gradients(row, microbatches) for row in rows]
    lowered = add_transfers(rows, stage_to_rank)
    return defer_receives(lowered, stage_to_rank) if defer else lowered


def add_unshard(row: Sequence[Action | None], active: int = ACTIVE_STAGES) -> list[Action | None]:
    """Adds UNSHARD before and RESHARD after the use of each stage of a rank.

    Before each action the next `active` distinct stages of the row are gathered, in the order of their use, and others let go. Idle cells
    stay.

    Args:
        row: the compute actions of one rank.
        active: the number of stages that are kept gathered, the one in use included.
    """
    gathered: dict[int, None] = {}  # in the order of gathering
    result: list[Action | None] = []
    for action, upcoming in zip(row, _upcoming_stages(row), strict=True):
        if action is not None:
            # An overlap uses two stages at once, so `active` of 1 does not keep the second one out.
            wanted = upcoming[: max(active, len(dict.fromkeys(part.stage for part in action.computations)))]
            for stage in [stage for stage in gathered if stage not in wanted]:
                del gathered[stage]
                result.append(Action(stage, _K.RESHARD))
            for stage in wanted:
                if stage not in gathered:
                    gathered[stage] = None
                    result.append(Action(stage, _K.UNSHARD))
        result.append(action)
    return result + [Action(stage, _K.RESHARD) for stage in gathered]


def _upcoming_stages(row: Sequence[Action | None]) -> list[tuple[int, ...]]:
    """For each cell the stages it and those after it use, in the order of their first use."""
    upcoming: list[tuple[int, ...]] = []
    later: tuple[int, ...] = ()
    for action in reversed(row):
        now = dict.fromkeys(part.stage for part in action.computations) if action is not None else {}
        later = (*now, *(stage for stage in later if stage not in now)) if now else later
        upcoming.append(later)
    upcoming.reverse()
    return upcoming


def add_reduce_gradients(row: Sequence[Action | None], microbatches: int) -> list[Action | None]:
    """Adds REDUCE_GRAD right after the action that completes a stage's gradients, its last B or W. Idle cells stay.

    Args:
        row: the actions of one rank.
        microbatches: the number of B or W that complete a stage.
    """
    backwards: Counter[int] = Counter()
    result: list[Action | None] = []
    for action in row:
        result.append(action)
        for part in action.computations if action is not None else ():
            if part.kind in (_K.B, _K.W):
                backwards[part.stage] += 1
                if backwards[part.stage] == microbatches:
                    result.append(Action(part.stage, _K.REDUCE_GRAD))
    return result


def add_transfers(rows: Rows, stage_to_rank: Sequence[int]) -> list[list[Action | None]]:
    """Adds SEND and RECV between stages on different ranks; see Note [Order of transfers]. Idle cells go away.

    Args:
        rows: the actions of each rank, without SEND and RECV.
        stage_to_rank: for each stage its rank.

    Raises:
        ScheduleError: no rank can go on, though there is more to do.
    """
    result: list[list[Action | None]] = [[] for _ in rows]

    def perform(rank: int, action: Action | None) -> None:
        if action is None:
            return
        result[rank].append(action)
        for part in action.parts or (action,):
            send = transfer_after(part, stage_to_rank)
            if send is not None:
                receive = send.other_end
                result[rank].append(send)
                result[stage_to_rank[receive.stage]].append(receive)

    _, stuck = carry_out(rows, lambda part: facts_needed(part, stage_to_rank, False), perform)
    if stuck:
        rank, step, _ = stuck[0]
        action = rows[rank][step]
        raise ScheduleError(
            f"Malformed compute schedule: no rank can go on. Rank {rank} stands at step {step}, {action}, whose inputs no rank gives; "
            f"call validate() first\n\n{format_grid(rows, (rank, step))}",
            rank=rank, step=step, stage=action.stage if action else None, microbatch=action.microbatch if action else None,
        )  # fmt: skip
    return result


def defer_receives(rows: Rows, stage_to_rank: Sequence[int]) -> list[list[Action | None]]:
    """Moves each RECV to right before its consumer, as far as Note [Order of transfers] lets it.

    Args:
        rows: the actions of each rank, with SEND and RECV.
        stage_to_rank: for each stage its rank.

    Returns:
        Rows with the same actions. A RECV that nothing consumes stands at the end.
    """
    return [_defer_row(row, rank, stage_to_rank) for rank, row in enumerate(rows)]


def _defer_row(row: Sequence[Action | None], rank: int, stage_to_rank: Sequence[int]) -> list[Action | None]:
    result: list[Action | None] = []
    pending: dict[Action, int] = {}  # RECV -> the rank it is from, in the order of the row
    for action in row:
        if action is not None:
            if action.kind.is_receive:
                pending[action] = stage_to_rank[action.other_end.stage]
                continue
            due: list[Action] = []
            if action.kind.is_send:
                peer = stage_to_rank[action.other_end.stage]
                if rank < peer:
                    due = [receive for receive, source in pending.items() if source == peer]
            for part in action.computations:
                kind = _RECEIVED_FOR.get(part.kind)
                receive = None if kind is None else Action(part.stage, kind, part.microbatch)
                if receive is not None and receive in pending:
                    due.append(receive)
            for receive in due:
                del pending[receive]
            result += due
        result.append(action)
    return result + list(pending)
