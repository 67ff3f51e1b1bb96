"""Dependencies of the actions of a schedule: the facts that an action waits for and the fact that it establishes.

Validation, lowering, tick counting and simulation all use this module, so that they agree on which schedules can run.

Note [Facts]
    Finished work is a set of *facts*: tuples of kind, stage and microbatch. An action may start when the facts it needs are there, and adds one when
    it is done. B and I give the same fact, since another stage waits for the gradient of the input, however it was made. Between stages of one rank
    values are handed over directly; between ranks a lowered schedule moves them by SEND and RECV, and a compute-only schedule takes the move for
    granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from aiograd.pipeline.schedule.action import Action, ActionKind

#: kind, stage, microbatch; the kind is I for a B too
Fact: TypeAlias = tuple[ActionKind, int, int | None]

_K = ActionKind


def fact_of(part: Action) -> Fact:
    """The fact that a single action (no OVERLAP_F_B) establishes when it is done."""
    return _K.I if part.kind is _K.B else part.kind, part.stage, part.microbatch


def facts_needed(part: Action, stage_to_rank: Sequence[int], lowered: bool) -> tuple[Fact, ...]:
    """The facts that a single action (no OVERLAP_F_B) waits for.

    Args:
        part: the action, or one part of an overlap.
        stage_to_rank: for each stage its rank.
        lowered: True if the schedule has SEND and RECV.

    Returns:
        The facts, other stages' last.
    """
    kind, stage, microbatch = part.kind, part.stage, part.microbatch
    if kind is _K.F:
        if stage == 0:
            return ()
        crosses = lowered and stage_to_rank[stage - 1] != stage_to_rank[stage]
        return ((_K.RECV_F, stage, microbatch) if crosses else (_K.F, stage - 1, microbatch),)
    if kind is _K.I or kind is _K.B:
        if stage == len(stage_to_rank) - 1:
            return ((_K.F, stage, microbatch),)
        crosses = lowered and stage_to_rank[stage + 1] != stage_to_rank[stage]
        return (_K.F, stage, microbatch), (_K.RECV_B, stage, microbatch) if crosses else (_K.I, stage + 1, microbatch)
    if kind is _K.W or kind is _K.SEND_B:
        return ((_K.I, stage, microbatch),)
    if kind is _K.SEND_F:
        return ((_K.F, stage, microbatch),)
    if kind is _K.RECV_F:
        return ((_K.SEND_F, stage - 1, microbatch),)
    if kind is _K.RECV_B:
        return ((_K.SEND_B, stage + 1, microbatch),)
    return ()


def transfer_after(part: Action, stage_to_rank: Sequence[int]) -> Action | None:
    """The SEND that has to follow a single compute action, or None where its result stays on the rank (or ends the pipeline)."""
    if part.kind is _K.F:
        kind, receiver = _K.SEND_F, part.stage + 1
    elif part.kind is _K.I or part.kind is _K.B:
        kind, receiver = _K.SEND_B, part.stage - 1
    else:
        return None
    if not 0 <= receiver < len(stage_to_rank) or stage_to_rank[receiver] == stage_to_rank[part.stage]:
        return None
    return Action(part.stage, kind, part.microbatch)


def carry_out(
    ranks: Sequence[Sequence[Action | None]],
    needs: Callable[[Action], Sequence[Fact]],
    perform: Callable[[int, Action | None], None] | None = None,
    *,
    looks_again: bool = False,
) -> tuple[int, list[tuple[int, int, Fact]]]:
    """Carries out rows as far as they go, in rounds: in each every rank, in order, does its next action if what that needs is there.

    A rank that waits is not looked at before that has come, so the time taken goes with the number of actions.

    Args:
        ranks: the actions of each rank; an idle cell needs nothing.
        needs: the facts that a single action waits for.
        perform: is told of each action when its turn has come, with its rank.
        looks_again: ranks that idled look again at the end of the round.

    Returns:
        The number of rounds; and rank, step and the missing fact of each rank that cannot go on: none if every row gets to its end.
    """
    done: set[Fact] = set()
    heads = [0] * len(ranks)
    waiting: dict[Fact, list[int]] = {}
    now = [rank for rank, row in enumerate(ranks) if row]
    rounds = 0
    while now:
        again: list[int] = []
        following: list[int] = []
        is_late = not looks_again
        while True:
            while now:
                rank = heappop(now)
                action = ranks[rank][heads[rank]]
                parts = () if action is None else action.parts or (action,)
                missing = [fact for part in parts for fact in needs(part) if fact not in done]
                if missing:
                    waiting.setdefault(missing[0], []).append(rank)
                    continue
                if perform is not None:
                    perform(rank, action)
                for part in parts:
                    fact = fact_of(part)
                    done.add(fact)
                    for woken in waiting.pop(fact) if fact in waiting else ():
                        if woken > rank:  # its turn in this round is still to come
                            heappush(now, woken)
                        else:
                            (following if is_late else again).append(woken)
                heads[rank] += 1
                if heads[rank] < len(ranks[rank]):
                    following.append(rank)
            if is_late:
                break
            is_late = True
            now, again = again, []
            heapify(now)
        rounds += 1
        now = following
        heapify(now)
    return rounds, sorted((rank, heads[rank], fact) for fact, ranks_waiting in waiting.items() for rank in ranks_waiting)
