"""Shrinking: what of all that a seed draws does its failure need?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.chaos.mix import Mix
from tests.chaos.world import run_seed


class Failure(NamedTuple):
    """How a run failed."""

    mix: Mix
    #: what was raised
    error: str
    #: what happened before
    story: list[str]


def attempt(seed: int | str, mix: Mix) -> Failure | None:
    """Run a seed with a mix; None where all is well."""
    story: list[str] = []
    try:
        run_seed(seed, mix=mix, story=story)
    except Exception as error:
        return Failure(mix, f"{type(error).__name__}: {error}", story)
    return None


def shrink(failure: Failure, try_again: Callable[[Mix], Failure | None], tell: Callable[[str], None]) -> Failure:
    """Switch off one thing after the other, as long as it goes on failing.

    Args:
        failure: what is to be made smaller.
        try_again: runs the seed with another mix.
        tell: gets a line for each thing that was not needed.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for what, mix in failure.mix.simpler():
            again = try_again(mix)
            if again is not None:
                tell(f"fails {what} as well: {again.error[:100]}")
                failure, is_smaller = again, True
                break
    return failure
