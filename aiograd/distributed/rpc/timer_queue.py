"""TimerQueue: which entry of a table is due next.

A heap that corrects entries when they reach its top, because nearly every entry is removed or postponed before it is due: both cost
a dictionary operation and leave the heap alone. It is rebuilt when most of it is out of date, so it stays as small as the table.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

#: entries that may be out of date before a rebuild pays
SLACK = 64


class TimerQueue:
    """Times by id."""

    __slots__ = ("_due", "_heap")

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        #: for each id in `_due` an entry at its time or before; others are out of date
        self._heap: list[tuple[float, int]] = []

    def set(self, id: int, when: float) -> None:
        """`id` is due at `when`, and no longer at the time set before."""
        due = self._due
        before = due.get(id)
        due[id] = when
        if before is None or when < before:
            heap = self._heap
            if len(heap) > 2 * len(due) + SLACK:
                heap[:] = [(time, each) for each, time in due.items()]
                heapify(heap)
            else:
                heappush(heap, (when, id))

    def remove(self, id: int) -> None:
        """`id` is due no more. Idempotent."""
        self._due.pop(id, None)

    def clear(self) -> None:
        """Nothing is due."""
        self._due.clear()
        self._heap.clear()

    def next(self) -> float | None:
        """When something is due next; None for never."""
        heap = self._heap
        if not self._due:
            heap.clear()
        while heap:
            when, id = heap[0]
            due = self._due.get(id)
            if due == when:
                return when
            if due is None or due < when:
                heappop(heap)
            else:
                heapreplace(heap, (due, id))
        return None

    def is_idle_until(self, when: float) -> bool:
        """True if nothing is due before `when`; may be False although nothing is. Cheaper than `next`."""
        heap = self._heap
        return not heap or heap[0][0] >= when

    def take(self, now: float) -> list[int]:
        """Remove and return the entries that are due at `now`, earliest first."""
        found: list[int] = []
        while (when := self.next()) is not None and when <= now:
            id = heappop(self._heap)[1]
            del self._due[id]
            found.append(id)
        return found
