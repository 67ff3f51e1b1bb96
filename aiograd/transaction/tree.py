"""How a decision reaches many participants: by a tree of them; and the workers that a participant asks if it does not come.

Note [A tree of receivers]
    A coordinator that tells n participants of its decision sends n messages and waits for n answers. Where they are many it tells some, each of
    which acts on the message, passes it on to a branch of the others at the same time, and answers for all of its branch. Nothing else changes: the
    coordinator alone decides, and a participant has acknowledged a decision only when its own answer has come, by any way. A participant that the
    tree has not reached, because a worker on the way was lost, did not know the way or was slow, is told directly. So a message may come twice, and
    late, which every participant has to cope with anyway; and no participant is told more than the decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

#: receivers that one worker tells directly
FANOUT = 32


def are_many(receivers: Sequence[object]) -> bool:
    """True if there are so many that they are told by a tree."""
    return len(receivers) > FANOUT


def branches(receivers: Sequence[T]) -> list[Sequence[T]]:
    """Cut receivers into branches of about the same size, at most `FANOUT`; the first of each is told, and tells the others.

    Args:
        receivers: in any order.

    Returns:
        The branches, none of them empty.
    """
    count = min(FANOUT, len(receivers))
    bounds = [len(receivers) * index // count for index in range(count + 1)] if count else []
    return [receivers[start:stop] for start, stop in itertools.pairwise(bounds)]


def witnesses(participants: Sequence[str], name: str) -> list[str]:
    """The workers that a participant asks for the decision, besides the coordinator: all others, or a few of many.

    If participants stand in a circle these are the neighbours at distances 1, 2, 4, ... on both sides. So the knowledge of one reaches all within as
    many rounds as the logarithm of their number, and each has to know few.

    Args:
        participants: names, sorted.
        name: of the one that asks.

    Returns:
        Names, sorted.
    """
    if not are_many(participants):
        return list(participants)
    others = [each for each in participants if each != name]
    here = sum(each < name for each in others)
    distances = [1 << power for power in range((len(others) // 2).bit_length())]
    found = {others[place % len(others)] for distance in distances for place in (here + distance, here - 1 - distance)}
    return sorted(found)
