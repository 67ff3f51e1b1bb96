"""Ablations: the test of the tests. Each protection is switched off in turn, and some run has to notice.

A protection that nothing misses is either not needed or not tested.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from aiograd.distributed.safeguards import ALL_ON, Safeguards
from aiograd.testing import Faults
from aiograd.testing.clock import DeadlockError
from tests.chaos import scenarios
from tests.chaos.mix import Mix
from tests.chaos.plain import plain_links
from tests.chaos.promises import Broken
from tests.chaos.world import Errand, Outcome, run_seed

#: every protection that can be switched off
PROTECTIONS = tuple(field.name for field in dataclasses.fields(Safeguards))
#: those that a moment made on purpose needs; the others are missed by random runs
SCENARIOS: dict[str, Errand] = {
    "open_only_by_call": scenarios.a_worker_that_lost_its_context,
    "commit_idempotent": scenarios.a_commit_whose_answer_is_lost,
    "shrink_deadline": scenarios.a_deadline_on_its_way,
    "propagate_cancel": scenarios.a_call_that_nobody_waits_for,
    "release_ends_calls": scenarios.a_context_that_is_left_early,
}


class Catch(NamedTuple):
    """What noticed that a protection was missing."""

    protection: str
    #: number of the first seed, or name of the scenario; None: nothing did
    by: int | str | None
    #: what was noticed
    how: str


def run_scenario(errand: Errand, safeguards: Safeguards = ALL_ON, seed: int | str = 0) -> Outcome:
    """Run one scenario.

    Raises:
        Broken: a promise was not kept.
    """
    return run_seed(f"scenario:{seed}", mix=scenarios.CALM, safeguards=safeguards, errands=[errand])


@contextlib.contextmanager
def _conditions(protection: str) -> Iterator[Callable[[int], Mix | None]]:
    """What random runs need to notice that this protection is missing: the mix of each seed, None for the usual one."""
    if protection != "checksum":
        yield lambda seed: None
        return
    with plain_links():
        yield lambda seed: dataclasses.replace(Mix.drawn(seed), faults=Faults(latency=(0.0005, 0.005), flip=0.05))


def catch_by_scenario(protection: str) -> Catch:
    """Switch a protection off and run the scenario that is there for it."""
    errand = SCENARIOS[protection]
    how = _noticed(lambda: run_scenario(errand, dataclasses.replace(ALL_ON, **{protection: False})))
    return Catch(protection, None if how is None else errand.__name__, how or "")  # type: ignore[attr-defined]


def catch_by_seeds(protection: str, seeds: int) -> Catch:
    """Switch a protection off and run seeds until one notices."""
    safeguards = dataclasses.replace(ALL_ON, **{protection: False})
    with _conditions(protection) as mix:
        for seed in range(seeds):
            how = _noticed(lambda seed=seed: run_seed(seed, safeguards=safeguards, mix=mix(seed)))  # type: ignore[misc]
            if how is not None:
                return Catch(protection, seed, how)
    return Catch(protection, None, "")


def run_plain(seed: int) -> Outcome:
    """Run a seed with links that do not encrypt and that change bits: what the checksum is there for.

    Raises:
        Broken: a promise was not kept.
    """
    with _conditions("checksum") as mix:
        return run_seed(seed, mix=mix(seed))


def _noticed(run: Callable[[], object]) -> str | None:
    try:
        run()
    except (Broken, DeadlockError, Exception) as error:  # whatever it is: with all protections on there is none
        return f"{type(error).__name__}: {error}"
    return None
