"""Items to lines of LLVM: rows on numbers in registers, loops over memory, calls of numpy's loops.

Note [Numbers in registers]
    Arrays of at most `LANES` elements are vectors, in the order of their elements, from the statement that makes them to the last one that
    reads them; views of them are shuffles. Others are in memory, and rows over the same elements are one loop (benchmarks `compiled`, `native`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.compiler.calls import Ref
from aiograd.compiler.native.elementwise import Lanes, emit_row, llvm_type, memory_type, splat, vector, word_of
from aiograd.compiler.native.items import FusedRows, Item, LoopCall, NativeCode, PickedElements, Root, RootKind, Row, dtype_of
from aiograd.compiler.native.layouts import broadcast_strides, offsets, places_in, span, walk
from aiograd.compiler.native.turns import in_turns
from aiograd.compiler.native.writer import Loop, Writer

#: elements, and bytes, of the arrays that are kept in registers
LANES = 16
LANE_BYTES = 64
#: bytes of one vector of a loop over memory
VECTOR_BYTES = 64
ALIGNMENT = 64
#: offset of the address of an array's memory in the array, see `aiograd.compiler.native.objects.layout_problem`
DATA = 16
#: flag of a place out of range; numpy's function answers then, under every handling of errors
OUT_OF_RANGE = 1 << 16


def is_small(ref: Ref) -> bool:
    """True for an array that is kept in registers."""
    dtype: Any = ref.dtype
    count = math.prod(ref.shape or ())
    return 0 < count <= LANES and count * dtype.itemsize <= LANE_BYTES and llvm_type(dtype) is not None


class ItemWriter(Writer):
    """Writes the items of one function.

    Args:
        native: the function as data.
        is_dynamic: True for a text without sizes.

    Attributes:
        scratch_bytes: of the memory that one call computes in.
    """

    def __init__(self, native: NativeCode, *, is_dynamic: bool = False) -> None:
        super().__init__(is_dynamic=is_dynamic)
        self._native = native
        self.scratch_bytes = 0
        #: objects of arguments, by parameter and place in it, -1 for a parameter that is the array; with -2 the items of a tuple
        self._arguments: dict[tuple[int, int], str] = {}
        self._registers: dict[Ref, str] = {}
        self._addresses: dict[Root, str] = {}
        self._free: list[tuple[int, int]] = []
        self._slots: dict[Root, tuple[int, int]] = {}
        #: by root, the last item that uses it; the item that is written
        self._last: dict[Root, int] = {}
        #: by item, the roots that it uses
        self._roots: list[list[Root]] = []
        self._number = 0
        #: in a loop over repeated bodies: offsets and numbers that differ, roots that items behind the body read; see `roll_code`
        self._moved: dict[Ref, str] = {}
        self._varied: dict[tuple[int, int], str] = {}
        self._kept: set[Root] = set()

    def _argument(self, path: tuple[int, int]) -> str:
        """The object of an argument."""
        found = self._arguments.get(path)
        if found is None:
            address = self._at("%args", 8 * path[0]) if path[1] < 0 else self._at(self._arguments[path[0], -2], 8 * path[1])
            found = self._arguments[path] = self._new(f"load ptr, ptr {address}")
        return found

    # ---------------------------------------------------------------- memory

    def _address(self, root: Root) -> str:
        """The address of the first element of a root."""
        found = self._addresses.get(root)
        if found is None:
            if root.kind is RootKind.ARGUMENT:
                found = self._new(f"load ptr, ptr {self._at(self._argument(root.path), DATA)}")
            elif root.kind is RootKind.CONSTANT:
                found = self._entry(("data", root.path[0]))
            elif root.kind is RootKind.SCRATCH:
                found = self._behind("%scratch", self._slot(root))
            else:
                raise AssertionError(f"{root.ref.name} has no memory yet")
            self._addresses[root] = found
        return found

    def _slot(self, root: Root) -> int:
        low, high = span(root.ref)
        if root in self._slots:
            return self._slots[root][0] - low
        size = -(-(high - low) // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        for i, (_, length) in enumerate(self._free):
            if length == size:
                offset = self._free.pop(i)[0]
                break
        else:
            offset = self.scratch_bytes
            self.scratch_bytes += size
        self._slots[root] = offset, size
        return offset - low

    def _place(self, ref: Ref) -> str:
        """The address of the first element of a Ref; its numbers are in memory."""
        location = self._native.locations[ref]
        root = location.root
        if root.kind is RootKind.SCRATCH and root not in self._addresses and root.ref in self._registers:
            self._write(root.ref, self._registers[root.ref], self._address(root))
        return self._where(ref)

    def _where(self, ref: Ref) -> str:
        """The address of the first element of a Ref, whether or not its numbers are there."""
        location = self._native.locations[ref]
        address, moved = self._address(location.root), self._moved.get(ref)
        if moved is not None:
            return self._new(f"getelementptr i8, ptr {address}, i64 {moved}")
        return self._behind(address, location.offset)

    def _behind(self, address: str, offset: int) -> str:
        """The address so many bytes behind one; in a text without sizes 0 is an offset as any other."""
        if not offset and not self._is_dynamic:
            return address
        return self._new(f"getelementptr i8, ptr {address}, i64 {self._size(offset)}")

    def _is_small(self, ref: Ref) -> bool:
        """As `is_small`; of arrays whose sizes are no part of the text, true for one element."""
        return is_small(ref) and (not self._is_dynamic or math.prod(ref.shape or ()) == 1)

    def _touch(self, ref: Ref, address: str, low: int, high: int) -> None:
        """Before every access: memory of an array is read or written from so many bytes behind an address up to so many. `CheckedEmitter` looks."""

    # ---------------------------------------------------------------- numbers

    def _lanes(self, ref: Ref) -> int:
        count = math.prod(ref.shape or ())
        return 0 if count == 1 else count

    def _register(self, ref: Ref) -> str:
        """The numbers of a small array."""
        found = self._registers.get(ref)
        if found is not None:
            return found
        location = self._native.locations[ref]
        root = location.root
        whole = None if root.is_pinned or ref in self._moved else self._registers.get(root.ref)
        if whole is not None and ref.dtype == root.ref.dtype:
            places = places_in(ref, location.offset, root.ref)
            found = self._shuffled(whole, self._lanes(root.ref), places, self._lanes(ref), str(llvm_type(ref.dtype)))  # type: ignore[arg-type]
        else:
            found = self._read(ref, self._where(ref))
        if not root.is_pinned:
            self._registers[ref] = found
        return found

    def _shuffled(self, value: str, lanes: int, places: list[int], wanted: int, kind: str) -> str:
        if places == list(range(max(lanes, 1))) and lanes == wanted:
            return value
        if not wanted:
            return self._new(f"extractelement <{lanes} x {kind}> {value}, i64 {places[0]}")
        if not lanes:
            value, lanes = self._new(f"insertelement <1 x {kind}> poison, {kind} {value}, i64 0"), 1
        mask = ", ".join([f"i32 {each}" for each in places])
        whole = f"<{lanes} x {kind}>"
        return self._new(f"shufflevector {whole} {value}, {whole} poison, <{wanted} x i32> <{mask}>")

    def _read(self, ref: Ref, address: str) -> str:
        """Load a small array."""
        dtype: Any = ref.dtype
        kind, lanes = memory_type(dtype), self._lanes(ref)
        self._touch(ref, address, *span(ref))
        if ref.is_in_order or not lanes:
            found = self._new(f"load {vector(kind, lanes)}, ptr {address}, align 1")
        else:
            found = "poison"
            for i, offset in enumerate(offsets(ref)):
                each = self._new(f"load {kind}, ptr {self._at(address, offset)}, align 1")
                found = self._new(f"insertelement <{lanes} x {kind}> {found}, {kind} {each}, i64 {i}")
        return self._to_register(found, dtype, lanes)

    def _to_register(self, value: str, dtype: np.dtype[Any], lanes: int) -> str:
        if dtype.kind != "b":
            return value
        zero = splat("i8", "0", lanes)
        return self._new(f"icmp ne {vector('i8', lanes)} {value}, {zero}")

    def _write(self, ref: Ref, value: str, address: str) -> None:
        """Store a small array."""
        dtype: Any = ref.dtype
        kind, lanes = memory_type(dtype), self._lanes(ref)
        if dtype.kind == "b":
            value = self._new(f"zext {vector('i1', lanes)} {value} to {vector('i8', lanes)}")
        self._touch(ref, address, *span(ref))
        if ref.is_in_order or not lanes:
            self._line(f"store {vector(kind, lanes)} {value}, ptr {address}, align 1")
            return
        for i, offset in enumerate(offsets(ref)):
            each = self._new(f"extractelement <{lanes} x {kind}> {value}, i64 {i}")
            self._line(f"store {kind} {each}, ptr {self._at(address, offset)}, align 1")

    # ---------------------------------------------------------------- items

    def _item(self, item: Item) -> None:
        if isinstance(item, LoopCall):
            self._loop_call(item)
            return
        if isinstance(item, PickedElements):
            self._picked(item)
            return
        if math.prod(item.shape) == 0:
            return
        small = all([self._is_small(row.result) and all(map(self._is_small, row.refs())) for row in item.rows])
        if small:
            for row in in_turns(item.rows):
                self._small_row(row)
        else:
            self._group(item)

    def _small_row(self, row: Row) -> None:
        lanes = Lanes(self._new, self._lanes(row.result))
        count = math.prod(row.result.shape or ())
        operands = []
        for number_, each in enumerate(row.operands):
            dtype = np.dtype(bool) if row.function is np.where and not number_ else row.dtype
            if each.__class__ is not Ref:
                operands.append(self._constant(lanes, row, number_, dtype))
                continue
            own = Lanes(self._new, self._lanes(each))
            value = own.cast(self._register(each), dtype_of(each), dtype)
            if each.shape != row.result.shape:
                places = np.broadcast_to(np.arange(math.prod(each.shape or ())).reshape(each.shape or ()), row.result.shape or ()).ravel().tolist()
                value = self._shuffled(value, own.lanes, places, lanes.lanes if count > 1 else 0, str(llvm_type(dtype)))
            operands.append(value)
        value = self._computed(lanes, row, operands)
        root = self._native.locations[row.result].root
        if not root.is_pinned:
            self._registers[row.result] = value
        if root.is_pinned or root.kind is not RootKind.SCRATCH or root in self._kept:
            self._write(row.result, value, self._where(row.result))

    def _constant(self, lanes: Lanes, row: Row, place: int, dtype: np.dtype[Any]) -> str:
        """An operand that is a number, in all lanes."""
        varied = self._varied.get((id(row), place))
        if varied is None and self._is_dynamic:
            address = self._numbers((word_of(np.asarray(row.operands[place]).astype(dtype)),))
            varied = self._to_register(self._new(f"load {memory_type(dtype)}, ptr {address}"), dtype, 0)
        if varied is None:
            return lanes.constant(row.operands[place], dtype)
        return self._shuffled(varied, 0, [0] * lanes.lanes, lanes.lanes, str(llvm_type(dtype))) if lanes.lanes else varied

    def _computed(self, lanes: Lanes, row: Row, operands: list[str]) -> str:
        if row.function is None:
            return operands[0]
        if row.function is np.where:
            return lanes.choice(operands[0], row.dtype, operands[1], operands[2])
        return emit_row(lanes, row.function, operands, row.dtype)

    # ---------------------------------------------------------------- loops over memory

    def _group(self, group: FusedRows) -> None:
        """One loop over all elements, with its operands loaded once."""
        locations = self._native.locations
        made: dict[Root, int] = {}
        loads: dict[Ref, tuple[int, ...]] = {}
        sources: list[list[Any]] = []
        for number_, row in enumerate(group.rows):
            found: list[Any] = []
            for each in row.operands:
                if each.__class__ is Ref:
                    if locations[each].root in made:
                        each = made[locations[each].root]
                    else:
                        loads[each] = broadcast_strides(each, group.shape)
                found.append(each)
            sources.append(found)
            made[locations[row.result].root] = number_
        stores = {row.result: row.result.strides or () for row in group.rows if self._is_used_after(locations[row.result].root, group)}
        addresses = {ref: self._place(ref) for ref in (*loads, *stores)}
        axes, strides = walk(group.shape, [*loads.values(), *stores.values()])
        steps = dict(zip((*loads, *stores), strides, strict=True))
        self._loops(axes, addresses, steps, lambda lanes, at: self._body(group, sources, lanes, at, tuple(loads), frozenset(stores), steps))

    def _is_used_after(self, root: Root, item: Item) -> bool:
        return root.is_pinned or root.kind is not RootKind.SCRATCH or root in self._kept or self._last[root] > self._number

    def _loops(self, axes: list[int], addresses: dict[Ref, str], steps: dict[Ref, list[int]], body: Any) -> None:
        """Loops around a body; the innermost one goes over vectors where every operand lies in a row or is one number."""
        refs = list(addresses)
        at = dict(addresses)
        loops = []
        for axis, length in enumerate(axes[:-1]):
            loops.append(self._loop_begin(length))
            for ref in refs:
                step = steps[ref][axis]
                if step:
                    at[ref] = self._in_loop(at[ref], loops[-1], step)
        length = axes[-1] if axes else 1
        sizes = [ref.dtype.itemsize for ref in refs]  # type: ignore[union-attr]
        in_rows = all([not steps[ref] or steps[ref][-1] in (0, size) for ref, size in zip(refs, sizes, strict=True)])
        lanes = VECTOR_BYTES // max(sizes) if in_rows else 0
        whole = length // lanes * lanes if lanes else 0
        for begin, end, side_by_side in ((0, whole, lanes), (whole, length, 0))[not lanes :]:
            if self._is_dynamic:
                self._inner_if_any(begin, end, side_by_side, refs, at, steps, body)
            elif begin < end:
                self._inner(begin, end, side_by_side, refs, at, steps, body)
        for loop in reversed(loops):
            self._loop_end(loop)

    def _inner(self, begin: int, end: int, lanes: int, refs: list[Ref], at: dict[Ref, str], steps: dict[Ref, list[int]], body: Any) -> None:
        step = lanes or 1
        if end - begin == step and not self._is_dynamic:
            here = {ref: self._at(at[ref], begin * steps[ref][-1]) if steps[ref] else at[ref] for ref in refs}
            body(lanes, here)
            return
        loop = self._loop_begin(end, step, begin)
        here = {}
        for ref in refs:
            stride = steps[ref][-1]
            here[ref] = self._in_loop(at[ref], loop, stride) if stride else at[ref]
        body(lanes, here)
        self._loop_end(loop)

    def _inner_if_any(self, begin: int, end: int, *arguments: Any) -> None:
        """As `_inner`, with a look whether the loop has anything to do."""
        some, none = self._fresh("some"), self._fresh("none")
        self._line(f"br i1 {self._new(f'icmp ult i64 {self._size(begin)}, {self._size(end)}')}, label %{some}, label %{none}")
        self._begin(some)
        self._inner(begin, end, *arguments)
        self._line(f"br label %{none}")
        self._begin(none)

    def _in_loop(self, address: str, loop: Loop, stride: int) -> str:
        """The address of an operand in a loop."""
        return self._new(f"getelementptr i8, ptr {address}, i64 {self._new(f'mul i64 {loop.i}, {self._size(stride)}')}")

    def _body(
        self, group: FusedRows, sources: list[list[Any]], lanes: int, at: dict[Ref, str], loads: tuple[Ref, ...], stores: frozenset[Ref], steps: Any
    ) -> None:
        lane = Lanes(self._new, lanes)
        loaded: dict[Ref, str] = {}
        for ref in loads:
            dtype: Any = ref.dtype
            kind = memory_type(dtype)
            is_one = lanes and steps[ref][-1] == 0
            self._touch(ref, at[ref], 0, dtype.itemsize * (1 if is_one else lanes or 1))
            if is_one:
                one = self._to_register(self._new(f"load {kind}, ptr {at[ref]}, align 1"), dtype, 0)
                loaded[ref] = self._shuffled(one, 0, [0] * lanes, lanes, str(llvm_type(dtype)))
            else:
                loaded[ref] = self._to_register(self._new(f"load {vector(kind, lanes)}, ptr {at[ref]}, align 1"), dtype, lanes)
        values: list[str] = []
        for row, found in zip(group.rows, sources, strict=True):
            operands = []
            for number_, (each, source) in enumerate(zip(row.operands, found, strict=True)):
                dtype = np.dtype(bool) if row.function is np.where and not number_ else row.dtype
                if each.__class__ is Ref:
                    value = values[source] if source.__class__ is int else loaded[source]
                    operands.append(lane.truth(value, dtype_of(each)) if dtype.kind == "b" else lane.cast(value, dtype_of(each), dtype))
                else:
                    operands.append(self._constant(lane, row, number_, dtype))
            value = self._computed(lane, row, operands)
            values.append(value)
            if row.result in stores:
                target: Any = row.result.dtype
                if target.kind == "b":
                    value = self._new(f"zext {lane.of('i1')} {value} to {lane.of('i8')}")
                self._touch(row.result, at[row.result], 0, target.itemsize * (lanes or 1))
                self._line(f"store {lane.of(memory_type(target))} {value}, ptr {at[row.result]}, align 1")

    # ---------------------------------------------------------------- calls of loops

    def _loop_call(self, item: LoopCall) -> None:
        if "%pointers" not in "".join(self._head):
            self._head.append("  %pointers = alloca [8 x ptr]")
        result = item.operands[-1]
        own = self._where(result)
        addresses = [own if ref is result else self._place(ref) for ref in item.operands]
        if item.first == "zero":
            self._touch(result, addresses[-1], 0, result.nbytes)
            self._line(f"call void @llvm.memset.p0.i64(ptr {addresses[-1]}, i8 0, i64 {self._size(result.nbytes)}, i1 false)")
        loops = []
        for length, moves in item.outer:
            loops.append(self._loop_begin(length))
            addresses = [self._in_loop(address, loops[-1], move) if move else address for address, move in zip(addresses, moves, strict=True)]
        for place, address in enumerate(addresses):
            self._touch(item.operands[place], address, *item.extent(place))
            self._line(f"store ptr {address}, ptr {self._at('%pointers', 8 * place)}")
        key = item.ufunc.__name__, item.types
        function, data = self._entry(("loop", *key)), self._entry(("loop data", *key))
        self._line(f"call void {function}(ptr %pointers, ptr {self._numbers(item.dimensions)}, ptr {self._numbers(item.steps)}, ptr {data})")
        for loop in reversed(loops):
            self._loop_end(loop)

    def _picked(self, item: PickedElements) -> None:
        """A loop over rows. A place out of range is read as 0, and noted among the flags."""
        source, places, result = item.source, item.places, item.result
        (rows, columns), (step, inner) = source.shape or (), source.strides or ()
        addresses = [self._place(source), self._place(places), self._where(result)]
        loop = self._loop_begin(rows)
        moves = (step, *(places.strides or ()), *(result.strides or ()))
        row, at, to = (self._in_loop(address, loop, move) for address, move in zip(addresses, moves, strict=True))
        self._touch(places, at, 0, 8)
        place = self._new(f"load i64, ptr {at}, align 1")
        is_inside = self._new(f"icmp ult i64 {place}, {self._size(columns)}")
        flag = self._new(f"select i1 {is_inside}, i32 0, i32 {OUT_OF_RANGE}")
        self._line(f"store i32 {self._new(f'or i32 {flag}, ' + self._new('load i32, ptr %flags'))}, ptr %flags")
        place = self._new(f"select i1 {is_inside}, i64 {place}, i64 0")
        address = self._new(f"getelementptr i8, ptr {row}, i64 {self._new(f'mul i64 {place}, {self._size(inner)}')}")
        kind = memory_type(dtype_of(source))
        self._touch(source, address, 0, dtype_of(source).itemsize)
        self._touch(result, to, 0, dtype_of(source).itemsize)
        self._line(f"store {kind} {self._new(f'load {kind}, ptr {address}, align 1')}, ptr {to}, align 1")
        self._loop_end(loop)
