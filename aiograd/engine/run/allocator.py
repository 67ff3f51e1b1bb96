"""``aiograd.tune_malloc``: memory that a step has freed is there for the next one.

Note [Fresh memory]
    A training step frees its memory, and the next step allocates the same again. As it comes, glibc's allocator hands freed memory at the
    end of a heap back to the system and takes it anew, page by page, each a fault of 4 µs: 3,500 faults and 15 of 62 ms in a step of two
    transformer blocks (bench large_tensors; 13 faults and 1 ms with these settings). And it keeps a heap per thread, so that what one thread
    of an executor has freed is of no use to the other: the CNN of the bench then needs 44 MB where its arrays are 25 MB at most (28 MB).

Rejected: a pool of large arrays of our own (arrays that BLAS, ufuncs and users make would not come from it, and views would have to be counted).
"""

from __future__ import annotations

import ctypes
import os
import sys

from aiograd.errors import ArgumentError

#: bytes of freed memory at the end of the heap that stay with the process
KEPT_BYTES = 256 << 20

#: glibc's number of each setting, and the variable of the environment that sets it too
_TRIM, _MMAP, _ARENAS = (-1, "MALLOC_TRIM_THRESHOLD_"), (-3, "MALLOC_MMAP_THRESHOLD_"), (-8, "MALLOC_ARENA_MAX")
#: blocks from this size on are mapped one by one, however often; the most that glibc takes
_LARGEST = 32 << 20


def tune_malloc(kept_bytes: int = KEPT_BYTES) -> bool:
    """Let the process keep memory that it has freed, in one heap for all threads, instead of handing it back and taking it anew in each step.

    `aiograd.run` and ``aiograd worker`` call it; a program that runs a loop of its own may call it at the start, before threads have allocated
    much. It is for the process and for good: the settings of an allocator can be written but not read. Settings of the environment
    (``MALLOC_ARENA_MAX``, ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``) stay as they are. See Note [Fresh memory].

    Args:
        kept_bytes: how much freed memory at the end of the heap may stay with the process, 1 MB to 2 GB.

    Returns:
        True if the allocator has taken the settings; False where it is not glibc's, and nothing was changed.

    Raises:
        ArgumentError: `kept_bytes` is out of range.
    """
    if not 1 << 20 <= kept_bytes < 1 << 31:
        raise ArgumentError(f"tune_malloc(kept_bytes={kept_bytes}): expected 1 MB to 2 GB ({1 << 20} to {(1 << 31) - 1} bytes)")
    if not sys.platform.startswith("linux") or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((_TRIM, kept_bytes), (_MMAP, _LARGEST), (_ARENAS, 1))
    return all([variable in os.environ or bool(mallopt(number, value)) for (number, variable), value in wanted])
