"""Ablations: the test of the tests. Each protection is taken out in turn (see `broken`), and some run has to notice.

A protection that nothing misses is either not needed or not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from aiograd.testing.clock import DeadlockError
from tests.chaos import scenarios
from tests.chaos.broken import without
from tests.chaos.promises import Broken
from tests.chaos.world import Errand, Outcome, run_seed

#: protections that a moment made on purpose needs; the others are missed by random runs
SCENARIOS: dict[str, Errand] = {
    "open_only_by_call": scenarios.a_worker_that_lost_its_context,
    "commit_idempotent": scenarios.a_commit_whose_answer_is_lost,
    "shrink_deadline": scenarios.a_deadline_on_its_way,
    "propagate_cancel": scenarios.a_call_that_nobody_waits_for,
    "answer_for_oneself": scenarios.a_commit_by_way_of_another,
    "tell_whom_the_tree_missed": scenarios.a_worker_lost_on_the_way_of_a_commit,
    "release_ends_calls": scenarios.a_context_that_is_left_early,
}


class Catch(NamedTuple):
    """The check that noticed a missing protection."""

    protection: str
    #: number of the first seed, or name of the scenario; None: nothing did
    by: int | str | None
    #: what was noticed
    how: str


def run_scenario(errand: Errand, seed: int | str = 0) -> Outcome:
    """Run one scenario.

    Raises:
        Broken: a promise was not kept.
    """
    return run_seed(f"scenario:{seed}", mix=scenarios.CALM, errands=[errand])


def catch_by_scenario(protection: str) -> Catch:
    """Take a protection out and run the scenario that is there for it."""
    errand = SCENARIOS[protection]
    with without(protection):
        how = _noticed(lambda: run_scenario(errand))
    return Catch(protection, None if how is None else errand.__name__, how or "")  # type: ignore[attr-defined]


def catch_by_seeds(protection: str, seeds: int, first: int = 0) -> Catch:
    """Take a protection out and run seeds from the first on until one notices."""
    with without(protection):
        for seed in range(first, first + seeds):
            how = _noticed(lambda seed=seed: run_seed(seed))  # type: ignore[misc]
            if how is not None:
                return Catch(protection, seed, how)
    return Catch(protection, None, "")


def _noticed(run: Callable[[], object]) -> str | None:
    try:
        run()
    except (Broken, DeadlockError, Exception) as error:  # whatever it is: with all protections there is none
        return f"{type(error).__name__}: {error}"
    return None
