"""Taking elements out of arrays at indices, and putting or adding them back.

Note [Three axes]
    An indexed array is seen as (outer, length, inner): `picks` indices along the middle axis give (outer, picks, inner). Where the array does not
    lie in C order, each of the three has a stride, in elements.

Note [Out of range]
    An index on a device can only be looked at there. One out of range (below -length or above length - 1) reads `missing`, NaN for floating
    arrays, and writes nothing.

Note [Adding with repetition]
    The indices come sorted, as keys ``index * picks + position``, so that the additions to one place are a run of keys in the order of the positions:
    the same bits every time, without atomics. Runs that are long are split: a chunk of keys that lies in one run whole has been summed before.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from aiograd.cuda.kernels.scalar import TYPES

_i8 = TYPES["i8"]

#: keys in a chunk
CHUNK = 64


def _gather(unsigned: Any, along: bool) -> Any:
    """A kernel that takes whole rows at `picks` indices or, `along`, each element at an index of its own."""

    def gather(
        out: Any, x: Any, index: Any, n: int, inner: int, picks: int, length: int,
        stride_outer: int, stride_axis: int, stride_inner: int, missing: Any,
    ) -> None:  # fmt: skip
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            row = unsigned(i) // unsigned(inner)
            c = _i8(unsigned(i) - row * unsigned(inner))
            a = row // unsigned(picks)
            j = _i8(index[i]) if along else _i8(index[_i8(row - a * unsigned(picks))])
            if j < 0:
                j += length
            if j >= 0 and j < length:
                out[i] = x[_i8(a) * stride_outer + j * stride_axis + c * stride_inner]
            else:
                out[i] = missing

    gather.__name__ = "gather_along" if along else "gather"
    return gather


def _put(unsigned: Any) -> Any:
    def put(
        out: Any, values: Any, keys: Any, n: int, inner: int, picks: int, length: int,
        to_outer: int, to_axis: int, to_inner: int, of_outer: int, of_axis: int, of_inner: int,
    ) -> None:  # fmt: skip
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            row = unsigned(i) // unsigned(inner)
            c = _i8(unsigned(i) - row * unsigned(inner))
            a = row // unsigned(picks)
            p = _i8(row - a * unsigned(picks))
            a = _i8(a)
            key = keys[p]
            j = key // picks
            last = True  # of the values for one place only the last is written
            if p + 1 < picks:
                last = keys[p + 1] // picks != j
            if last and j < length:
                out[a * to_outer + j * to_axis + c * to_inner] = values[a * of_outer + (key - j * picks) * of_axis + c * of_inner]

    return put


def keys_of(keys: Any, index: Any, picks: int, length: int) -> None:
    """Sortable keys of indices; those out of range come last."""
    for i in range(cuda.grid(1), picks, cuda.gridsize(1)):
        j = _i8(index[i])
        if j < 0:
            j += length
        if j < 0 or j >= length:
            j = length
        keys[i] = j * picks + i


def run_starts(starts: Any, keys: Any, picks: int, length: int) -> None:
    """Where in the sorted keys the run of each index begins; one more for the end of the last."""
    for j in range(cuda.grid(1), length + 1, cuda.gridsize(1)):
        wanted = j * picks
        low = _i8(0)
        high = _i8(picks)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        starts[j] = low


def _chunk_sums(unsigned: Any, wide: Any) -> Any:
    def chunk_sums(partial: Any, g: Any, keys: Any, n: int, inner: int, picks: int, chunks: int) -> None:
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            row = unsigned(i) // unsigned(inner)
            c = _i8(unsigned(i) - row * unsigned(inner))
            a = row // unsigned(chunks)
            first = _i8(row - a * unsigned(chunks)) * CHUNK
            j = keys[first] // picks
            if keys[first + CHUNK - 1] // picks == j:
                total = wide(0)
                base = _i8(a) * picks - j * picks
                for p in range(first, first + CHUNK):
                    total += wide(g[(base + keys[p]) * inner + c])
                partial[i] = total

    return chunk_sums


def _add_runs(unsigned: Any, wide: Any, narrow: Any) -> Any:
    def add_runs(out: Any, g: Any, keys: Any, starts: Any, partial: Any, n: int, inner: int, picks: int, length: int, chunks: int) -> None:
        for i in range(cuda.grid(1), n, cuda.gridsize(1)):
            row = unsigned(i) // unsigned(inner)
            c = _i8(unsigned(i) - row * unsigned(inner))
            a = row // unsigned(length)
            j = _i8(row - a * unsigned(length))
            a = _i8(a)
            p = starts[j]
            end = starts[j + 1]
            total = wide(0)
            base = a * picks - j * picks
            while p < end:
                if p % CHUNK == 0 and p + CHUNK <= end:
                    total += partial[(a * chunks + p // CHUNK) * inner + c]
                    p += CHUNK
                else:
                    total += wide(g[(base + keys[p]) * inner + c])
                    p += 1
            out[i] = narrow(total)

    return add_runs


def _write_along(unsigned: Any, adds: bool) -> Any:
    """A kernel with a thread for each column of `out`, in the order of the indices.

    Values are added, or of several values for one place the last stays.
    """

    def write_along(out: Any, values: Any, index: Any, columns: int, inner: int, picks: int, length: int) -> None:
        for i in range(cuda.grid(1), columns, cuda.gridsize(1)):
            a = unsigned(i) // unsigned(inner)
            c = _i8(unsigned(i) - a * unsigned(inner))
            a = _i8(a)
            for b in range(picks):
                place = (a * picks + b) * inner + c
                j = _i8(index[place])
                if j < 0:
                    j += length
                if j >= 0 and j < length:
                    if adds:
                        out[(a * length + j) * inner + c] += values[place]
                    else:
                        out[(a * length + j) * inner + c] = values[place]

    write_along.__name__ = "add_along" if adds else "put_along"
    return write_along


_WIDTHS = {False: TYPES["u4"], True: TYPES["u8"]}
#: True if elements are counted in 64 bits -> kernel
GATHER = {wide: _gather(unsigned, False) for wide, unsigned in _WIDTHS.items()}
GATHER_ALONG = {wide: _gather(unsigned, True) for wide, unsigned in _WIDTHS.items()}
PUT = {wide: _put(unsigned) for wide, unsigned in _WIDTHS.items()}
ADD_ALONG = {wide: _write_along(unsigned, True) for wide, unsigned in _WIDTHS.items()}
PUT_ALONG = {wide: _write_along(unsigned, False) for wide, unsigned in _WIDTHS.items()}
#: (True if elements are counted in 64 bits, letters of the sum, letters of the result) -> kernel
_ACCUMULATE = (("f4", "f2"), ("f4", "f4"), ("f8", "f8"), ("i8", "i8"), ("i4", "i4"))
CHUNK_SUMS = {(wide, total): _chunk_sums(unsigned, TYPES[total]) for wide, unsigned in _WIDTHS.items() for total in ("f4", "f8", "i8", "i4")}
ADD_RUNS = {
    (wide, total, result): _add_runs(unsigned, TYPES[total], TYPES[result]) for wide, unsigned in _WIDTHS.items() for total, result in _ACCUMULATE
}
