"""Recomputation: which values a forward keeps for the backward, and which are computed again there, so that a share of the memory suffices.

Note [Plans]
    A plan is a set of values for each backward step, computed again just before it. The rest follows, from the last step to the first: before step t
    there have to be in memory ::

        before[t] = (reads[t] | arguments of again[t] | before[t + 1]) - again[t]

    and during it `before[t]` and `again[t]`. So a value that is computed again is dropped between its uses before and after, may be computed again
    several times, and the values of before[0] are kept by the forward. Every choice of sets is a right plan; only its memory and
    its time differ. The search changes one set at a time and looks at the steps before it until nothing changes any more.

Note [The search]
    It starts with nothing computed again and takes the change with the least time for the memory by which the plan exceeds its budget, summed over
    the steps, until it fits. Then it takes back some changes at a time and mends the plan again, and keeps what is faster. Its length is a number of
    looks at steps, not a time: the same program has the same plan everywhere. Against the optimum, by an integer program, see the tests.

Source: the formulation follows P. Jain et al., Checkmate, MLSys 2020, which solves an integer program.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aiograd.errors import ArgumentError

#: looks at steps that a search makes, and that one for a smaller budget makes
MOST_LOOKS = 60_000
FEW_LOOKS = 20_000
#: the largest share by which the order of changes is disturbed, and the most changes that are looked at then
NOISE = 1.0
MOST_PAIRS = 300
#: values times steps up to which a value may be computed again before the step that reads it, and changes are taken strictly in order; in larger
#: plans one is taken that is at most so many times worse than the best one seemed before
SMALL = 1000
ROUGH = 1.5


@dataclass(frozen=True)
class RecomputePlan:
    """The choice of values to keep in the forward; the other ones are computed again.

    Attributes:
        kept: the values in memory between forward and backward.
        recompute: by backward step, the values that are computed again just before it, in order.
        peak: the most memory at any time, in bytes.
        full: the memory of all values that some step reads, in bytes.
        extra: the cost of all that is computed again.
        live: by backward step, the memory during it, in bytes.
    """

    kept: frozenset[int]
    recompute: tuple[tuple[int, ...], ...]
    peak: int
    full: int
    extra: float
    live: tuple[int, ...] = ()


def plan(values: Sequence[tuple[float, int, Sequence[int]]], uses: Sequence[Sequence[int]], budget: float) -> RecomputePlan:
    """The fastest plan that was found whose memory is at most a share of what it would be.

    Args:
        values: (cost, bytes, reads) of each value of the forward, in its order; reads are numbers of earlier values. A value of infinite cost is
            never computed again.
        uses: the values that each backward step reads, in the order of the backward.
        budget: the share, above 0 and at most 1.

    Returns:
        The plan. During a step memory holds its reads, every kept or recomputed value that a later step needs, and all values that are computed again
        for it.

    Raises:
        ArgumentError: a budget outside (0, 1], values that read later ones, or no plan was found; then with the smallest budget that has one.

    >>> plan([(1.0, 8, ()), (1.0, 8, (0,)), (1.0, 8, (1,)), (1.0, 8, (2,))], [(3,), (2,), (1,), (0,)], 0.5).extra
    2.0
    """
    check_budget(budget, "plan(budget=")
    for number, (cost, size, reads) in enumerate(values):
        if not cost >= 0 or size < 0 or any([not 0 <= each < number for each in reads]):
            given = cost, size, tuple(reads)
            raise ArgumentError(f"plan(): value {number} is {given}; expected a cost and bytes of at least 0, and reads of earlier values")
    if any([not 0 <= each < len(values) for reads in uses for each in reads]):
        raise ArgumentError(f"plan(): a backward step reads a value that is none of the {len(values)}")
    search = _PlanSearch(values, uses)
    if search.find(budget * search.full, MOST_LOOKS):
        return search.result()
    found = _smallest(_PlanSearch(values, uses), budget)
    if found.peak <= budget * search.full:
        return found
    smallest = math.ceil(found.peak / search.full * 1000) / 1000
    raise ArgumentError(
        f"memory budget {budget}: no plan was found that holds at most {int(budget * search.full):,} of {search.full:,} bytes. The smallest budget "
        f"found is {smallest}; pass that or more."
    )


def check_budget(budget: Any, where: str) -> None:
    """Raise an `ArgumentError` for a budget outside (0, 1]."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        raise ArgumentError(f"{where}{budget!r}): expected a share of the memory, above 0 and at most 1")


def _smallest(search: _PlanSearch, low: float) -> RecomputePlan:
    """The plan with the smallest peak that a few searches for other budgets find."""
    search.begin(float(search.full))
    best, high = search.result(), 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if search.find(middle * search.full, FEW_LOOKS):
            best = min(best, search.result(), key=lambda found: found.peak)
            high = min(middle, best.peak / search.full)
        else:
            low = middle
    return best


class _PlanSearch:
    """The plan at hand: see the module's Notes. Sets of values are the bits of ints.

    Attributes:
        again, before, during: by step, sets of values: see Note [Plans].
        held: by step, the bytes of `during`.
        cost: of everything that is computed again.
    """

    def __init__(self, values: Sequence[tuple[float, int, Sequence[int]]], uses: Sequence[Sequence[int]]) -> None:
        self.costs = [cost for cost, _, _ in values]
        self.sizes = [size for _, size, _ in values]
        self.arguments = [_mask(reads) for _, _, reads in values]
        self.reads = [_mask(reads) for reads in uses]
        self.is_small = len(values) * len(uses) <= SMALL
        self.full = self._bytes(_mask(number for reads in uses for number in reads))

    def _bytes(self, mask: int) -> int:
        return sum([self.sizes[number] for number in _bits(mask)])

    # ---------------------------------------------------------------- the plan

    def begin(self, limit: float) -> None:
        """Nothing is computed again."""
        self.limit = limit
        self.again = [0] * len(self.reads)
        self.before = [0] * (len(self.reads) + 1)
        for step in reversed(range(len(self.reads))):
            self.before[step] = self.reads[step] | self.before[step + 1]
        self.during = self.before[:-1]
        self.held = [self._bytes(mask) for mask in self.during]
        self.cost = 0.0

    def look(self, step: int, again: int) -> tuple[float, float, list[tuple[int, int, int, int, int]]]:
        """The changes that a set for a step brings: in cost, in bytes above the limit, and in the entries of the steps."""
        changes: list[tuple[int, int, int, int, int]] = []
        cost = over = 0.0
        later, sizes, limit = self.before[step + 1], self.sizes, self.limit
        for each in range(step, -1, -1):
            self.looks += 1
            old = self.again[each]
            now, needed = self._needed(again if each == step else old, self.reads[each] | later)
            before = needed & ~now
            if before == self.before[each] and now == old:
                break
            during, held = before | now, self.held[each]
            for number in _bits(during ^ self.during[each]):
                held += sizes[number] if during >> number & 1 else -sizes[number]
            over += max(0.0, held - limit) - max(0.0, self.held[each] - limit)
            for number in _bits(now ^ old) if now != old else ():
                cost += self.costs[number] if now >> number & 1 else -self.costs[number]
            changes.append((each, now, before, during, held))
            if before == self.before[each]:
                break
            later = before
        return cost, over, changes

    def _needed(self, again: int, needed: int) -> tuple[int, int]:
        """The values of a step that have to be computed again, and all values that are needed for that."""
        found = 0
        while again:
            number = again.bit_length() - 1
            again ^= 1 << number
            if needed >> number & 1:
                found |= 1 << number
                needed |= self.arguments[number]
        return found, needed

    def take(self, cost: float, over: float, changes: list[tuple[int, int, int, int, int]]) -> None:
        """Make the changes that `look` has found."""
        self.cost += cost
        for step, again, before, during, held in changes:
            self.again[step], self.before[step], self.during[step], self.held[step] = again, before, during, held

    # ---------------------------------------------------------------- the search

    def find(self, limit: float, looks: int) -> bool:
        """Search for a plan within the limit; False if none was found."""
        self.looks = 0
        self.source = random.Random(len(self.reads))  # noqa: S311 - the same changes for the same program
        self.begin(limit)
        if any([self._bytes(reads) > limit for reads in self.reads]):
            return False
        self.noise, self.slack = 0.0, 1.0 if self.is_small else ROUGH
        self.mend(math.inf)
        if self._over() > 0 and self.slack > 1.0:
            self.slack = 1.0
            self.begin(limit)
            self.mend(math.inf)
        best = self._copy()
        while self.looks < looks and (best[0] > 0 or best[1] > 0):
            if not self._undo_some():
                break
            self.noise = self.source.random() * NOISE
            self.mend(best[1] if best[0] <= 0 else math.inf)
            if (self._over(), self.cost) <= best[:2]:
                best = self._copy()
            else:
                self._restore(best)
        self._restore(best)
        return self._over() <= 0

    def _over(self) -> float:
        return sum([held - self.limit for held in self.held if held > self.limit])

    def mend(self, most: float) -> None:
        """Compute more again until the plan fits, or costs more than `most`; then take back unnecessary changes."""
        pairs = self._pairs() if self._over() > 0 else []
        if self.noise and len(pairs) > MOST_PAIRS:
            pairs = self.source.sample(pairs, MOST_PAIRS)
        waiting = [entry for step, number in pairs for entry in self._entries(step, number)]
        heapq.heapify(waiting)
        while waiting and self._over() > 0 and self.cost < most:
            _, step, number, deep = heapq.heappop(waiting)
            entry = self._entry(step, number, deep)
            if entry is None:
                continue
            score, _, _, _ = entry
            if waiting and score > waiting[0][0] * self.slack and not self.noise:
                heapq.heappush(waiting, entry)
                continue
            old = self.again[step]
            self.take(*self.look(step, self._with(step, number, deep)))
            arguments = 0
            for each in _bits(self.again[step] & ~old):
                arguments |= self.arguments[each]
            for each in _bits(arguments & ~self.again[step]):
                for new in self._entries(step, each):
                    heapq.heappush(waiting, new)
        if self._over() <= 0:
            self._take_back()

    def _pairs(self) -> list[tuple[int, int]]:
        """Steps and values that may be computed again there: the reads of a step, and in small plans the values in memory during it."""
        steps = range(len(self.reads))
        masks = [self.reads[step] | (self.before[step + 1] if self.is_small else 0) for step in steps]
        return [(step, number) for step in steps for number in _bits(masks[step] & ~self.again[step])]

    def _with(self, step: int, number: int, deep: bool) -> int:
        """The set of a step with a value, and if `deep` with its arguments that would otherwise have to be held for it."""
        found, there = self.again[step] | 1 << number, self.before[step] | self.again[step]
        missing = self.arguments[number] & ~there if deep else 0
        while missing:
            each = missing.bit_length() - 1
            missing ^= 1 << each
            if self.costs[each] < math.inf:
                found |= 1 << each
                missing |= self.arguments[each] & ~there & ~found
        return found

    def _entries(self, step: int, number: int) -> Iterator[tuple[float, int, int, bool]]:
        for deep in (False, True):
            if deep and self._with(step, number, True) == self.again[step] | 1 << number:
                continue
            entry = self._entry(step, number, deep)
            if entry is not None:
                yield entry

    def _entry(self, step: int, number: int, deep: bool) -> tuple[float, int, int, bool] | None:
        """The cost of a change by the bytes that it brings, and the change; None if it brings nothing."""
        if self.costs[number] == math.inf or self.again[step] >> number & 1:
            return None
        cost, over, _ = self.look(step, self._with(step, number, deep))
        return None if over >= 0 else (cost / -over * (1.0 + self.noise * self.source.random()), step, number, deep)

    def _chosen(self) -> list[tuple[int, int]]:
        return [(step, number) for step, mask in enumerate(self.again) for number in _bits(mask)]

    def _take_back(self) -> None:
        """Take back the values that the plan fits without, the most expensive first."""
        for step, number in sorted(self._chosen(), key=lambda entry: -self.costs[entry[1]]):
            if self.again[step] >> number & 1:
                found = self.look(step, self.again[step] & ~(1 << number))
                if found[0] < 0 and all([held <= self.limit for *_, held in found[2]]):
                    self.take(*found)

    def _undo_some(self) -> bool:
        """Take back some changes, near to each other or anywhere; False if there are none."""
        chosen = self._chosen()
        if not chosen:
            return False
        count = min(len(chosen), self.source.randint(1, 4))
        first = self.source.randrange(len(chosen))
        picked = chosen[first : first + count] if self.source.random() < 0.5 else self.source.sample(chosen, count)
        for step, number in picked:
            self.take(*self.look(step, self.again[step] & ~(1 << number)))
        return True

    def _copy(self) -> tuple[float, float, list[int], list[int], list[int], list[int]]:
        return self._over(), self.cost, [*self.again], [*self.before], [*self.during], [*self.held]

    def _restore(self, copy: tuple[float, float, list[int], list[int], list[int], list[int]]) -> None:
        _, self.cost, again, before, during, held = copy
        self.again, self.before, self.during, self.held = [*again], [*before], [*during], [*held]

    def result(self) -> RecomputePlan:
        """The plan."""
        recompute = tuple([_bits(mask) for mask in self.again])
        kept = frozenset(_bits(self.before[0]))
        extra = math.fsum([self.costs[number] for numbers in recompute for number in numbers])
        return RecomputePlan(kept, recompute, max(self.held, default=0), self.full, extra, tuple(self.held))


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


@lru_cache(maxsize=1 << 14)
def _bits(mask: int) -> tuple[int, ...]:
    """The numbers of the bits, the lowest first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
