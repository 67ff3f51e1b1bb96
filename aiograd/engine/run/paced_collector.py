"""PacedCollector: Python's garbage collector in short pauses.

Note [Three generations and the frozen one]
    Python's collector is generational: an automatic collection looks at objects made lately, except the collection of the oldest generation, which
    looks at everything that is alive and takes a third of a second beside two million objects. Graphs die by reference count; all of that looking
    finds what user code has tied into cycles.

    Here the oldest generation is kept small as well: whenever it has been collected, `gc.freeze` moves its survivors into the permanent
    generation, which no automatic collection looks at. A pause then depends on `THRESHOLDS` and no longer on the size of the heap, and each
    object is looked at three times in its life. Cycles that die after they were frozen stay until a full collection, one that begins with
    `gc.unfreeze`. It comes when the process is idle (see `tuned_gc`), when user code calls ``gc.collect()``, and, however busy the process is,
    when its memory has grown, see Note [Memory asks].

Note [Memory asks]
    Memory that has been freed is often not given back to the system, and is filled again unseen. So there are two measures of growth by `GROWTH`.
    Growth since the last full collection asks at once. Growth since the last one that found next to no garbage, after which all that the process
    held was in use, asks as soon as the frozen objects have become more by the share `WORTHWHILE_SHARE`, which is as often as CPython would
    collect. So memory is bounded by the memory in use, times `GROWTH`, and the garbage in so many objects.

Note [In the callback]
    `gc.callbacks` are called in the thread that collects, before the collector takes the lists of objects and after it has put the survivors back.
    `gc.unfreeze` before therefore makes a full collection of one that was due anyway, and no thread or event loop has to be there for it.

Note [Large tables]
    A collection goes through all entries of a container that is young, be it one object: the table of a pass through 500,000 nodes is 20 ms of
    work, in each generation. A pass that has made such a table says so (`skip_next`), and the next collection freezes young objects unseen. The
    table dies by reference count like everything else of a pass.

Note [Rearmed]
    CPython leaves the oldest generation alone until a quarter as many objects have been added as it kept the last time. That makes sense where
    a collection looks at all of them. After a full collection it would let a quarter of the heap pile up, so an empty collection follows, in which
    nothing is kept. It cannot be started in a callback: `rearm` is called soon after.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable

#: of `gc.set_threshold`; the first is CPython 3.13's own, for with 700 a graph of a thousand nodes is looked at twice before it is freed
THRESHOLDS = (2000, 2, 1)
#: objects that are collected together with the oldest generation at most, and frozen if they are alive; it takes 2 to 4 ms
PROMOTED = THRESHOLDS[0] * ((THRESHOLDS[1] + 2) * (THRESHOLDS[2] + 1) + 1)
#: so many entries of one table take about 2 ms
LARGE_TABLE = 50_000
#: some versions of CPython freeze a few hundred objects of their own when they start, which may be thawed
FROZEN_BY_PYTHON = 1000
#: memory grows by this factor, and by at least this many bytes, between two full collections of a process that is never idle
GROWTH, GROWTH_BYTES = 1.5, 64 << 20
#: garbage found, as a share of the objects frozen since the collection before, below which it is next to none
LITTLE_GARBAGE = 0.01
#: frozen objects, and their share of all that were frozen before, for which a full collection is worth its time when the process is idle
WORTHWHILE, WORTHWHILE_SHARE = 50_000, 0.25


def resident_memory() -> int:
    """Bytes of memory that the process holds; where the system does not say, an estimate from Python's allocator."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(200).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return sys.getallocatedblocks() * 64


class PacedCollector:
    """The settings of the process's garbage collector, held by any number of holders. See Note [Three generations and the frozen one].

    Args:
        memory: bytes of memory that the process holds.
    """

    def __init__(self, memory: Callable[[], int] = resident_memory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._holders = 0
        #: the thresholds that were set before, and whether objects had been frozen already, by a program that wants them to stay so
        self._thresholds = (0, 0, 0)
        self._had_frozen = False
        #: True while a full collection runs; after one, until `rearm`; while that runs
        self._is_full = self._needs_rearming = self._is_rearming = False
        #: True if the next collection freezes instead of looking
        self._skips_next = False
        #: at the last full collection: objects frozen, bytes of memory; and an upper bound of the objects frozen since then
        self._kept = 0
        self._memory_kept = 0
        #: bytes of memory after the last full collection that found next to no garbage
        self._memory_in_use = 0
        self._promoted = 0
        #: full collections so far
        self.full_collections: int = 0

    def acquire(self) -> None:
        """Set the thresholds and freeze all live objects, unless another holder has done so."""
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            self._thresholds = gc.get_threshold()
            self._had_frozen = gc.get_freeze_count() > FROZEN_BY_PYTHON
            self._kept = self._promoted = 0
            self._skips_next = False
            self._needs_rearming = True  # objects kept by earlier collections count too
            self._memory_kept = self._memory_in_use = self._memory()
            if self._thresholds[0]:  # 0 is one of two ways to switch the collector off
                gc.set_threshold(*THRESHOLDS)
            gc.callbacks.append(self._on_collection)
            gc.freeze()

    def release(self) -> None:
        """Restore the previous thresholds, unless there are other holders. Settings changed meanwhile by other code stay."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            with contextlib.suppress(ValueError):
                gc.callbacks.remove(self._on_collection)
            if gc.get_threshold() == THRESHOLDS:
                gc.set_threshold(*self._thresholds)
            if not self._had_frozen:
                gc.unfreeze()

    def is_worthwhile(self) -> bool:
        """True if a full collection may find something; never where automatic collections are switched off."""
        return gc.isenabled() and gc.get_threshold()[0] > 0 and self._promoted >= max(WORTHWHILE, WORTHWHILE_SHARE * self._kept)

    def skip_next(self) -> None:
        """Freeze young objects at the next collection instead of looking at it. See Note [Large tables]."""
        self._skips_next = True

    def collect(self) -> None:
        """Run a full collection."""
        gc.collect()  # `_on_collection` makes it a full one
        self.rearm()

    def rearm(self) -> None:
        """Make automatic collections of the oldest generation go on after a full one. See Note [Rearmed]."""
        if self._needs_rearming:
            self._needs_rearming = False
            self._is_rearming = True
            try:
                gc.collect()
            finally:
                self._is_rearming = False

    def _memory_asks(self) -> bool:
        """See Note [Memory asks]."""
        memory = self._memory()
        if _has_grown(memory, self._memory_kept):
            return True
        return self._promoted >= WORTHWHILE_SHARE * self._kept and _has_grown(memory, self._memory_in_use)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """See Note [In the callback]."""
        if self._skips_next and phase == "start":
            self._skips_next = False
            gc.freeze()
            self._promoted += PROMOTED
        if info["generation"] < 2:
            return
        if phase == "start":
            if not self._is_rearming and (_was_asked_for() or self._memory_asks()):
                self._is_full = True
                gc.unfreeze()
            return
        gc.freeze()
        if self._is_full:
            self._is_full = False
            self._needs_rearming = True
            self._memory_kept = self._memory()
            if info["collected"] < LITTLE_GARBAGE * self._promoted:
                self._memory_in_use = self._memory_kept
            self._promoted = 0
            self._kept = gc.get_freeze_count()
            self.full_collections += 1
        else:
            self._promoted += PROMOTED


def _has_grown(memory: int, before: int) -> bool:
    return memory - before > max(GROWTH_BYTES, (GROWTH - 1) * before)


def _was_asked_for() -> bool:
    """True if a collection of the oldest generation that is about to begin was started by ``gc.collect()`` and not by the counters."""
    counts, thresholds = gc.get_count(), gc.get_threshold()
    return counts[0] <= thresholds[0] or counts[2] <= thresholds[2]


#: of this process, which has one collector
PROCESS_COLLECTOR = PacedCollector()
