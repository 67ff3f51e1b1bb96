"""The checking mode of native functions: ``AIOGRAD_NATIVE_CHECK=1`` has every access to memory looked at before it happens.

Note [Checks]
    Each load and store, and the memory that one call of a numpy loop goes through, has to lie within its array; the bounds of an argument come
    from the array at run time. The memory that a function computes in has red zones between its arrays, which nothing may
    write: they find a numpy loop that goes further than it is told to. A check that fails ends the call with an `AssertionError`, before the access.
    For tests (``make native``): a checked function runs one call at a time and is several times slower.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.compiler.calls import Ref
from aiograd.compiler.native.emit import Emitter
from aiograd.compiler.native.items import NativeCode, Root, RootKind
from aiograd.compiler.native.layouts import span
from aiograd.errors import ArgumentError

#: bytes of a red zone, and their value
RED_BYTES = 64
RED = 0xA5
#: place of the table for the number of the check that has failed
FAILED = ("failed check",)


def is_checked() -> bool:
    """True if the environment asks for checks.

    Raises:
        ArgumentError: AIOGRAD_NATIVE_CHECK is something else than 0 or 1.
    """
    value = os.environ.get("AIOGRAD_NATIVE_CHECK", "0")
    if value not in ("", "0", "1"):
        raise ArgumentError(f"AIOGRAD_NATIVE_CHECK={value!r}: expected 0 or 1")
    return value == "1"


class CheckedEmitter(Emitter):
    """Writes the text of a function with checks.

    Args:
        native: the function as data.
        name: of the function.
        is_dynamic: True for a text without sizes.

    Attributes:
        checks: a text for each check.
        red_zones: offsets of red zones in the memory that the function computes in.
    """

    stack_bytes = 0  # all of that memory comes from the table, where `CheckedFunction` sees it

    def __init__(self, native: NativeCode, name: str, *, is_dynamic: bool = False) -> None:
        super().__init__(native, name, is_dynamic=is_dynamic)
        self.checks: list[str] = []
        self.red_zones: list[int] = []
        #: in a loop over repeated bodies, the bounds in this repetition
        self._moving: dict[Root, tuple[str, str]] = {}

    def _slot(self, root: Root) -> int:
        if not self.scratch_bytes:
            self._add_red_zone()
        before = self.scratch_bytes
        offset = super()._slot(root)
        if self.scratch_bytes > before:
            self._add_red_zone()
        return offset

    def _add_red_zone(self) -> None:
        self.red_zones.append(self.scratch_bytes)
        self.scratch_bytes += RED_BYTES

    def _touch(self, ref: Ref, address: str, low: int, high: int) -> None:
        root = self._native.locations[ref].root
        first, last = self._bounds(root)
        begin = self._new(f"ptrtoint ptr {self._behind(address, low)} to i64")
        end = self._new(f"add i64 {begin}, {self._size(high - low)}")
        below, above = self._new(f"icmp ult i64 {begin}, {first}"), self._new(f"icmp ugt i64 {end}, {last}")
        bad = self._new(f"or i1 {below}, {above}")
        inside, outside = self._fresh("inside"), self._fresh("outside")
        self._line(f"br i1 {bad}, label %{outside}, label %{inside}")
        self._begin(outside)
        self.checks.append(f"item {self._number} ({ref.name}, {ref.dtype}{list(ref.shape or ())}) in the memory of {root.ref.name}")
        place = self.table.setdefault(FAILED, len(self.table))
        self._line(f"store i64 {len(self.checks)}, ptr getelementptr (i64, ptr @table, i64 {place})")
        self._line("br label %violated")
        self._begin(inside)

    def _bases(self, root: Root, every: tuple[Root, ...], i: str) -> None:
        ends = []
        for end, key in enumerate(("low", "high")):
            if root.kind is RootKind.ARGUMENT:
                places = self._varying(tuple([self.table.setdefault((key, each.path), len(self.table)) for each in every]), i)
                ends.append(self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr @table, i64 {places}')}"))
            else:
                offset = self._varying(tuple([span(each.ref)[end] for each in every]), i)
                address = self._new(f"getelementptr i8, ptr {self._addresses[root]}, i64 {offset}")
                ends.append(self._new(f"ptrtoint ptr {address} to i64"))
        self._moving[root] = ends[0], ends[1]

    def _forget(self, roots: set[Root]) -> None:
        super()._forget(roots)
        self._moving.clear()

    def _bounds(self, root: Root) -> tuple[str, str]:
        if root in self._moving:
            return self._moving[root]
        if root.kind is RootKind.ARGUMENT:
            return self._entry(("low", root.path), "i64"), self._entry(("high", root.path), "i64")
        low, high = span(root.ref)
        address = self._address(root)
        return tuple([self._new(f"ptrtoint ptr {self._behind(address, end)} to i64") for end in (low, high)])  # type: ignore[return-value]

    def _finish(self, result: str, gives_back: bool, has_items: bool) -> None:
        super()._finish(result, gives_back, has_items)
        self._begin("violated")
        if self._state:
            self._call("void", "PyEval_RestoreThread", f"ptr {self._state}")
        self._line("br label %back")


class CheckedFunction:
    """A native function with checks.

    Args:
        name: of the function.
        function: as it was emitted.
        emitter: that has written it.
        table: of the function.
        scratch: the memory that it computes in, and its address there.

    Raises:
        AssertionError: on a call, an access was outside of its array, or a red zone was written.
    """

    def __init__(self, name: str, function: Callable[..., Any], emitter: CheckedEmitter, table: Any, scratch: tuple[Any, int] | None) -> None:
        self.__name__ = name
        self._function = function
        self._checks = emitter.checks
        self._red_zones = emitter.red_zones
        self._places = emitter.table
        self._table = table
        self._scratch = scratch
        self._lock = threading.RLock()  # the numpy function of the same code may come back here

    def __call__(self, *arguments: Any) -> Any:
        with self._lock:
            self._prepare(arguments)
            try:
                return self._function(*arguments)
            finally:
                self._look()

    def _prepare(self, arguments: Sequence[Any]) -> None:
        for key, place in self._places.items():
            if key[0] in ("low", "high"):
                parameter, item = key[1]
                array = arguments[parameter] if item < 0 else arguments[parameter][item]
                bounds = np.lib.array_utils.byte_bounds(array) if isinstance(array, np.ndarray) else (0, 0)
                self._table[place] = bounds[key[0] == "high"]
        if self._scratch is not None:
            memory, address = self._scratch
            memory.fill(RED)
            self._table[self._places["scratch",]] = address

    def _look(self) -> None:
        failed = self._table[self._places[FAILED]] if FAILED in self._places else 0
        if failed:
            self._table[self._places[FAILED]] = 0
            raise AssertionError(f"native function {self.__name__}: {self._checks[failed - 1]} was to be touched outside of it; a defect of aiograd")
        if self._scratch is not None:
            memory, address = self._scratch
            begin = address - memory.ctypes.data
            for offset in self._red_zones:
                if (memory[begin + offset : begin + offset + RED_BYTES] != RED).any():
                    raise AssertionError(f"native function {self.__name__}: the red zone at {offset} of its memory was written; a defect of aiograd")
