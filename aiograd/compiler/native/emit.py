"""NativeCode to a text of LLVM: a function with the calling convention of built-in functions of CPython.

Note [What the function does]
    It takes the parameters of its `ArrayCode`, arrays or tuples of arrays, and returns its results. First it looks that every argument is a plain
    array, aligned to its elements, and makes the arrays that it returns; then it computes; then it looks at the flags of floating-point errors.
    Where something is otherwise than expected it calls the numpy function of the same code, with the same arguments, which warns or raises as that
    does: it has changed nothing by then but memory that the numpy function writes first.
    Addresses are no part of the text. They lie in `table`, which is filled when the function is loaded; so the text is the same in every process.

Note [Numbers in registers]
    Arrays of at most `LANES` elements are vectors, in the order of their elements, from the statement that makes them to the last one that
    reads them; views of them are shuffles. Others are in memory, and rows over the same elements are one loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.compiler.calls import ARENA, ArrayCode, Ref
from aiograd.compiler.native.elementwise import Lanes, emit_row, llvm_type, memory_type, number, splat, vector
from aiograd.compiler.native.items import Group, Item, Location, LoopCall, NativeCode, Root, RootKind, Row
from aiograd.running.trees import leaves_of

#: elements, and bytes, of the arrays that are kept in registers
LANES = 16
LANE_BYTES = 64
#: bytes of one vector of a loop over memory
VECTOR_BYTES = 64
#: bytes of memory that the function takes from the stack; more comes from a buffer of its own
STACK_BYTES = 4096
ALIGNMENT = 64
#: arguments that are looked at or handed on by a loop
MANY = 8
#: estimated nanoseconds from which on the interpreter's lock is released
RELEASE_NS = 50_000

#: offsets in objects of CPython and numpy, see `aiograd.compiler.native.objects.layout_problem`
TYPE, DATA, ITEMS = 8, 16, 24
#: flags of the control register of x86-64: divide 4, over 8, under 16, invalid 1
FLAGS = {"invalid": 1, "divide": 4, "over": 8, "under": 16}
ALL_FLAGS = 1 | 4 | 8 | 16
#: of flags that are told whatever the handling around the program is
ALWAYS = 8


def is_small(ref: Ref) -> bool:
    """True for an array that is kept in registers."""
    dtype: Any = ref.dtype
    count = math.prod(ref.shape or ())
    return 0 < count <= LANES and count * dtype.itemsize <= LANE_BYTES and llvm_type(dtype) is not None


class Emitter:
    """Writes the text of one function.

    Args:
        native: what the function does.
        name: of the function.

    Attributes:
        table: what each place of the table holds, by a key that means the same in every process.
        scratch_bytes: of the memory that one call computes in.
    """

    def __init__(self, native: NativeCode, name: str) -> None:
        self._native = native
        self._name = name
        self._lines: list[str] = []
        self._head: list[str] = []
        self._count = itertools.count()
        self.table: dict[Any, int] = {}
        self._globals: list[str] = []
        self._shapes: dict[tuple[int, ...], str] = {}
        self._intrinsics: set[str] = set()
        self._registers: dict[Ref, str] = {}
        self._addresses: dict[Root, str] = {}
        self._arguments: dict[tuple[int, int], str] = {}
        self._made: dict[Root, str] = {}
        self.scratch_bytes = 0
        self._free: list[tuple[int, int]] = []
        self._slots: dict[Root, tuple[int, int]] = {}
        self._last: dict[Root, int] = {}
        self._label = "entry"
        self._checks: list[tuple[str, int]] = []
        #: the object that is returned, once it is there
        self._outer = ""

    # ---------------------------------------------------------------- writing

    def _line(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def _new(self, text: str) -> str:
        name = f"%x{next(self._count)}"
        self._lines.append(f"  {name} = {text}")
        if " @llvm." in text:
            self._note_intrinsic(text)
        return name

    def _note_intrinsic(self, text: str) -> None:
        """Declare a function of LLVM, of one argument."""
        kind, _, rest = text.removeprefix("call ").partition(" @")
        self._intrinsics.add(f"declare {kind} @{rest.partition('(')[0]}({kind})")

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._label = label

    def _entry(self, key: Any, kind: str = "ptr") -> str:
        """What a place of the table holds."""
        place = self.table.setdefault(key, len(self.table))
        return self._new(f"load {kind}, ptr getelementptr (i64, ptr @table, i64 {place})")

    def _at(self, address: str, offset: int) -> str:
        return address if not offset else self._new(f"getelementptr i8, ptr {address}, i64 {offset}")

    def _call(self, kind: str, key: str, *arguments: str) -> str:
        """A call of a function of the table."""
        function = self._entry(("function", key))
        text = f"call {kind} {function}({', '.join(arguments)})"
        if kind == "void":
            self._line(text)
            return ""
        return self._new(text)

    def _numbers(self, values: tuple[int, ...]) -> str:
        """A constant array of 64-bit integers."""
        if not values:
            return "null"
        name = self._shapes.get(values)
        if name is None:
            name = self._shapes[values] = f"@n{len(self._shapes)}"
            self._globals.append(f"{name} = private constant [{len(values)} x i64] [{', '.join(f'i64 {each}' for each in values)}]")
        return name

    # ---------------------------------------------------------------- the function

    def text(self) -> str:
        """The text."""
        native = self._native
        for number_, item in enumerate(native.items):
            for ref in (*item.reads(), *item.writes()):
                self._last[native.locations[ref].root] = number_
        self._take_arguments()
        result = self._results(native.code.results)
        self._arguments = {path: found for path, found in self._arguments.items() if path[1] == -2}
        self._line("br label %compute")
        self._begin("compute")
        cost = sum(map(_cost, native.items))
        releases = cost > RELEASE_NS
        body = len(self._lines)
        self._line("br label %body")
        self._begin("body")
        if native.items:
            self._clear_flags()
        state = self._call("ptr", "PyEval_SaveThread") if releases else ""
        errors: tuple[tuple[str, str], ...] = ()
        for number_, item in enumerate(native.items):
            if item.errors != errors or isinstance(item, LoopCall):
                if number_:
                    self._collect_flags(errors)
                errors = item.errors
            self._number = number_
            self._item(item)
            for ref in (*item.reads(), *item.writes()):
                root = native.locations[ref].root
                if self._last[root] == number_ and root in self._slots:
                    self._free.append(self._slots.pop(root))
                    self._addresses.pop(root, None)
        if native.items:
            self._collect_flags(errors)
        if releases:
            self._call("void", "PyEval_RestoreThread", f"ptr {state}")
        scratch = self._scratch(body)
        self._finish(result, bool(scratch), bool(native.items))
        return self._assembled()

    def _assembled(self) -> str:
        lines = [
            f"@table = global [{max(len(self.table), 1)} x i64] zeroinitializer", *self._globals, *sorted(self._intrinsics),
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)", "declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)",
            f"define ptr @{self._name}(ptr %self, ptr %args, i64 %count) {{", "entry:", *self._head, *self._lines, "}",
        ]
        return "\n".join(lines) + "\n"

    def _take_arguments(self) -> None:
        """Load the addresses of objects, and look that they are plain arrays."""
        code = self._native.code
        used = {root.path for location in self._native.locations.values() if (root := location.root).kind is RootKind.ARGUMENT}
        self._ndarray = self._entry(("type", "ndarray"))
        arrays = [(number_, parameter) for number_, parameter in enumerate(code.parameters) if isinstance(parameter, Ref) and (number_, -1) in used]
        wrong = [self._check_items("%args", arrays)] if arrays else []
        for number_, parameter in enumerate(code.parameters):
            if not isinstance(parameter, Ref) and parameter[1]:
                items = self._items_of(self._new(f"load ptr, ptr {self._at('%args', 8 * number_)}"))
                self._arguments[number_, -2] = items
                if parameter[0] != ARENA:
                    wrong.append(self._check_items(items, [(i, ref) for i, ref in enumerate(parameter[1]) if ref.dtype is not None]))
        if wrong:
            bad = wrong[0]
            for each in wrong[1:]:
                bad = self._new(f"or i1 {bad}, {each}")
            self._line(f"br i1 {bad}, label %other, label %make")
            self._begin("make")

    def _items_of(self, sequence: str) -> str:
        """The address of the items of a tuple or list."""
        behind = self._at(sequence, ITEMS)
        kind = self._new(f"load ptr, ptr {self._at(sequence, TYPE)}")
        is_list = self._new(f"icmp eq ptr {kind}, {self._entry(('type', 'list'))}")
        items = self._new(f"load ptr, ptr {behind}")
        return self._new(f"select i1 {is_list}, ptr {items}, ptr {behind}")

    def _is_no_array(self, array: str, ref: Ref) -> str:
        kind = self._new(f"load ptr, ptr {self._at(array, TYPE)}")
        is_other = self._new(f"icmp ne ptr {kind}, {self._ndarray}")
        dtype: Any = ref.dtype
        size = dtype.alignment
        if size == 1:
            return is_other
        data = self._new(f"load i64, ptr {self._at(array, DATA)}")
        odd = self._new(f"icmp ne i64 {self._new(f'and i64 {data}, {size - 1}')}, 0")
        return self._new(f"or i1 {is_other}, {odd}")

    def _check_items(self, items: str, refs: list[tuple[int, Ref]]) -> str:
        """Whether one of these items is no plain array; by a loop where there are many."""
        if not refs:
            return "false"
        if len(refs) < MANY or refs[-1][0] != len(refs) - 1:
            found = [self._is_no_array(self._new(f"load ptr, ptr {self._at(items, 8 * i)}"), ref) for i, ref in refs]
            bad = found[0]
            for each in found[1:]:
                bad = self._new(f"or i1 {bad}, {each}")
            return bad
        places = [(i, ref.dtype.alignment - 1) for i, ref in refs]  # type: ignore[union-attr]
        masks = self._numbers(tuple([mask for _, mask in places]))
        begin, before = self._fresh("check"), self._label
        self._line(f"br label %{begin}")
        self._begin(begin)
        i, bad, after, worse = (f"%x{next(self._count)}" for _ in range(4))
        self._lines.append(f"  {i} = phi i64 [0, %{before}], [{after}, %{begin}]")
        self._lines.append(f"  {bad} = phi i64 [0, %{before}], [{worse}, %{begin}]")
        array = self._new(f"load ptr, ptr {self._new(f'getelementptr ptr, ptr {items}, i64 {i}')}")
        kind = self._new(f"load ptr, ptr {self._at(array, TYPE)}")
        other = self._new(f"zext i1 {self._new(f'icmp ne ptr {kind}, {self._ndarray}')} to i64")
        data = self._new(f"load i64, ptr {self._at(array, DATA)}")
        mask = self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr {masks}, i64 {i}')}")
        odd = self._new(f"or i64 {other}, {self._new(f'and i64 {data}, {mask}')}")
        self._lines.append(f"  {worse} = or i64 {bad}, {odd}")
        self._lines.append(f"  {after} = add i64 {i}, 1")
        more = self._new(f"icmp ult i64 {after}, {len(places)}")
        end = self._fresh("checked")
        self._line(f"br i1 {more}, label %{begin}, label %{end}")
        self._begin(end)
        return self._new(f"icmp ne i64 {worse}, 0")

    def _fresh(self, prefix: str) -> str:
        return f"{prefix}{next(self._count)}"

    # ---------------------------------------------------------------- objects

    def _argument(self, path: tuple[int, int]) -> str:
        """The object of an argument."""
        found = self._arguments.get(path)
        if found is None:
            address = self._at("%args", 8 * path[0]) if path[1] < 0 else self._at(self._arguments[path[0], -2], 8 * path[1])
            found = self._arguments[path] = self._new(f"load ptr, ptr {address}")
        return found

    def _results(self, tree: Any, owner: Any = None) -> str:
        """Make the object that is returned, with the arrays in it; the name of it.

        Args:
            owner: kind and name of the sequence that it is put into, and the place there.
        """
        if tree.__class__ in (tuple, list):
            kind = "PyTuple" if tree.__class__ is tuple else "PyList"
            made = self._checked(self._call("ptr", f"{kind}_New", f"i64 {len(tree)}"))
            if owner:
                self._call("i32", f"{owner[0]}_SetItem", f"ptr {owner[1]}", f"i64 {owner[2]}", f"ptr {made}")
            handed_on = self._handed_on(tree)
            for (base, items) in handed_on.items():
                self._hand_on(kind, made, base, items)
            done = {i for items in handed_on.values() for i, _ in items}
            for i, item in enumerate(tree):
                if item.__class__ in (tuple, list):
                    self._results(item, (kind, made, i))
                elif i not in done:
                    self._call("i32", f"{kind}_SetItem", f"ptr {made}", f"i64 {i}", f"ptr {self._result(item)}")
            return made
        return self._result(tree)

    def _handed_on(self, tree: Any) -> dict[int, list[tuple[int, int]]]:
        """The items that are arguments as they are, where there are many: by parameter, -1 for parameters themselves, places in both."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, item in enumerate(tree):
            if item.__class__ is Ref:
                location = self._native.locations[item]
                if location.root.kind is RootKind.ARGUMENT and not location.offset and _is_same_layout(item, location.root.ref):
                    parameter, place = location.root.path
                    base, place = (-1, parameter) if place < 0 else (parameter, place)
                    found.setdefault(base, []).append((i, place))
        return {base: items for base, items in found.items() if len(items) >= MANY}

    def _hand_on(self, kind: str, made: str, base: int, items: list[tuple[int, int]]) -> None:
        """Put many arguments into a sequence, by a loop."""
        source = "%args" if base < 0 else self._arguments[base, -2]
        targets, places = self._numbers(tuple([i for i, _ in items])), self._numbers(tuple([place for _, place in items]))
        i, label = self._loop_begin(len(items), 1)
        place = self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr {places}, i64 {i}')}")
        target = self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr {targets}, i64 {i}')}")
        each = self._new(f"load ptr, ptr {self._new(f'getelementptr ptr, ptr {source}, i64 {place}')}")
        self._call("void", "Py_IncRef", f"ptr {each}")
        self._call("i32", f"{kind}_SetItem", f"ptr {made}", f"i64 {target}", f"ptr {each}")
        self._loop_end(i, label, len(items), 1)

    def _checked(self, made: str) -> str:
        """Leave with the error where an object could not be made."""
        is_null = self._new(f"icmp eq ptr {made}, null")
        then = self._fresh("made")
        failed = self._fresh("failed")
        self._line(f"br i1 {is_null}, label %{failed}, label %{then}")
        self._begin(failed)
        if self._outer:
            self._call("void", "Py_DecRef", f"ptr {self._outer}")
        self._line("ret ptr null")
        self._begin(then)
        self._outer = self._outer or made
        return made

    def _result(self, tree: Any) -> str:
        if tree is None:
            none = self._entry(("object", "None"))
            self._call("void", "Py_IncRef", f"ptr {none}")
            return none
        location: Location = self._native.locations[tree]
        root = location.root
        if root.kind is RootKind.RESULT:
            whole = self._made.get(root)
            if whole is None:
                whole = self._made[root] = self._checked(self._new_array(root.ref, "null"))
                self._addresses[root] = self._new(f"load ptr, ptr {self._at(whole, DATA)}")
                if not location.offset and _is_same_layout(tree, root.ref):
                    return whole
                fresh = True
            else:
                fresh = False
        else:
            whole = self._argument(root.path) if root.kind is RootKind.ARGUMENT else self._entry(("constant", root.path[0]))
            fresh = False
        if not location.offset and _is_same_layout(tree, root.ref):
            self._call("void", "Py_IncRef", f"ptr {whole}")
            return whole
        data = self._at(self._address(root), location.offset)
        view = self._checked(self._new_array(tree, data))
        if not fresh:
            self._call("void", "Py_IncRef", f"ptr {whole}")
        self._call("i32", "PyArray_SetBaseObject", f"ptr {view}", f"ptr {whole}")
        return view

    def _new_array(self, ref: Ref, data: str) -> str:
        dtype, shape, strides = ref.dtype, ref.shape or (), ref.strides or ()
        descr = self._entry(("dtype", dtype.str))  # type: ignore[union-attr]
        self._call("void", "Py_IncRef", f"ptr {descr}")
        dims, steps = self._numbers(shape), "null" if ref.is_in_order and data == "null" else self._numbers(strides)
        is_repeated = any([length > 1 and not stride for length, stride in zip(shape, strides, strict=True)])
        flags = 0 if data == "null" or is_repeated else 0x0400  # writeable; the others are worked out
        return self._call(
            "ptr", "PyArray_NewFromDescr", f"ptr {self._ndarray}", f"ptr {descr}", f"i32 {len(shape)}", f"ptr {dims}", f"ptr {steps}", f"ptr {data}",
            f"i32 {flags}", "ptr null",
        )

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
                found = self._at("%scratch", self._slot(root))
            else:
                raise AssertionError(f"{root.ref.name} has no memory yet")
            self._addresses[root] = found
        return found

    def _slot(self, root: Root) -> int:
        low, high = _span(root.ref)
        size = -(-(high - low) // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        for i, (offset, length) in enumerate(self._free):
            if length == size:
                del self._free[i]
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
        return self._at(self._address(root), location.offset)

    def _scratch(self, body: int) -> str:
        """Take the memory to compute in, before everything that uses it."""
        if not self.scratch_bytes:
            return ""
        text = [f"  %stack = alloca [{min(self.scratch_bytes, STACK_BYTES)} x i8], align {ALIGNMENT}"]
        if self.scratch_bytes <= STACK_BYTES:
            self._head += [*text[:1], "  %scratch = getelementptr i8, ptr %stack, i64 0"]
            return ""
        before, self._lines = self._lines[:body], self._lines[body:]
        rest, self._lines = self._lines, before
        kept = self._entry(("scratch",))
        place = self.table["scratch",]
        self._line(f"store ptr null, ptr getelementptr (i64, ptr @table, i64 {place})")
        is_taken = self._new(f"icmp eq ptr {kept}, null")
        self._line(f"br i1 {is_taken}, label %more, label %taken")
        self._begin("more")
        more = self._call("ptr", "PyMem_RawMalloc", f"i64 {self.scratch_bytes + ALIGNMENT}")
        none = self._new(f"icmp eq ptr {more}, null")
        self._line(f"br i1 {none}, label %back, label %enough")
        self._begin("enough")
        number_ = self._new(f"ptrtoint ptr {more} to i64")
        up = self._new(f"and i64 {self._new(f'add i64 {number_}, {ALIGNMENT - 1}')}, {-ALIGNMENT}")
        aligned = self._new(f"inttoptr i64 {up} to ptr")
        self._line("br label %taken")
        self._begin("taken")
        self._lines.append(f"  %scratch = phi ptr [{kept}, %compute], [{aligned}, %enough]")
        self._lines.append(f"  %borrowed = phi ptr [null, %compute], [{more}, %enough]")
        self._lines += rest
        return kept

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
        whole = None if root.is_pinned else self._registers.get(root.ref)
        if whole is not None and ref.dtype == root.ref.dtype:
            places = _places(ref, location.offset, root.ref)
            found = self._shuffled(whole, self._lanes(root.ref), places, self._lanes(ref), str(llvm_type(ref.dtype)))  # type: ignore[arg-type]
        else:
            found = self._read(ref, self._at(self._address(root), location.offset))
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
        if ref.is_in_order or not lanes:
            found = self._new(f"load {vector(kind, lanes)}, ptr {address}, align 1")
        else:
            found = "poison"
            for i, offset in enumerate(_offsets(ref)):
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
        if ref.is_in_order or not lanes:
            self._line(f"store {vector(kind, lanes)} {value}, ptr {address}, align 1")
            return
        for i, offset in enumerate(_offsets(ref)):
            each = self._new(f"extractelement <{lanes} x {kind}> {value}, i64 {i}")
            self._line(f"store {kind} {each}, ptr {self._at(address, offset)}, align 1")

    # ---------------------------------------------------------------- items

    def _item(self, item: Item) -> None:
        if isinstance(item, LoopCall):
            self._loop_call(item)
            return
        if math.prod(item.shape) == 0:
            return
        small = all([is_small(row.result) and all(map(is_small, row.refs())) for row in item.rows])
        if small:
            for row in item.rows:
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
                operands.append(lanes.constant(each, dtype))
                continue
            own = Lanes(self._new, self._lanes(each))
            value = own.cast(self._register(each), each.dtype, dtype)
            if each.shape != row.result.shape:
                places = np.broadcast_to(np.arange(math.prod(each.shape)).reshape(each.shape), row.result.shape).ravel().tolist()
                value = self._shuffled(value, own.lanes, places, lanes.lanes if count > 1 else 0, str(llvm_type(dtype)))
            operands.append(value)
        value = self._computed(lanes, row, operands)
        location = self._native.locations[row.result]
        root = location.root
        if not root.is_pinned:
            self._registers[row.result] = value
        if root.is_pinned or root.kind is not RootKind.SCRATCH:
            self._write(row.result, value, self._at(self._address(root), location.offset))

    def _computed(self, lanes: Lanes, row: Row, operands: list[str]) -> str:
        kind = str(llvm_type(row.dtype))
        if row.function is None:
            return operands[0]
        if row.function is np.where:
            return lanes.select(operands[0], kind, operands[1], operands[2])
        return emit_row(lanes, row.function, operands, row.dtype)

    # ---------------------------------------------------------------- loops over memory

    def _group(self, group: Group) -> None:
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
                        loads[each] = _broadcast_strides(each, group.shape)
                found.append(each)
            sources.append(found)
            made[locations[row.result].root] = number_
        stores = {row.result: row.result.strides or () for row in group.rows if self._is_used_after(locations[row.result].root, group)}
        addresses = {ref: self._place(ref) for ref in (*loads, *stores)}
        axes, strides = _walk(group.shape, [*loads.values(), *stores.values()])
        steps = dict(zip((*loads, *stores), strides, strict=True))
        self._loops(axes, addresses, steps, lambda lanes, at: self._body(group, sources, lanes, at, tuple(loads), frozenset(stores), steps))

    def _is_used_after(self, root: Root, item: Item) -> bool:
        return root.is_pinned or root.kind is not RootKind.SCRATCH or self._last[root] > self._number

    def _loops(self, axes: list[int], addresses: dict[Ref, str], steps: dict[Ref, list[int]], body: Any) -> None:
        """Loops around a body; the innermost one goes over vectors where every operand lies in a row or is one number."""
        refs = list(addresses)
        at = dict(addresses)
        ends = []
        for axis, length in enumerate(axes[:-1]):
            i, end = self._loop_begin(length, 1)
            ends.append((i, end, length))
            for ref in refs:
                step = steps[ref][axis]
                if step:
                    at[ref] = self._new(f"getelementptr i8, ptr {at[ref]}, i64 {self._new(f'mul i64 {i}, {step}')}")
        length = axes[-1] if axes else 1
        sizes = [ref.dtype.itemsize for ref in refs]  # type: ignore[union-attr]
        in_rows = all([not steps[ref] or steps[ref][-1] in (0, size) for ref, size in zip(refs, sizes, strict=True)])
        lanes = VECTOR_BYTES // max(sizes) if in_rows else 0
        whole = length // lanes * lanes if lanes else 0
        if whole:
            self._inner(0, whole, lanes, refs, at, steps, body)
        if whole < length:
            self._inner(whole, length, 0, refs, at, steps, body)
        for i, end, count in reversed(ends):
            self._loop_end(i, end, count, 1)

    def _inner(self, begin: int, end: int, lanes: int, refs: list[Ref], at: dict[Ref, str], steps: dict[Ref, list[int]], body: Any) -> None:
        step = lanes or 1
        if end - begin == step:
            here = {ref: self._at(at[ref], begin * steps[ref][-1]) if steps[ref] else at[ref] for ref in refs}
            body(lanes, here)
            return
        i, label = self._loop_begin(end, step, begin)
        here = {}
        for ref in refs:
            stride = steps[ref][-1]
            here[ref] = self._new(f"getelementptr i8, ptr {at[ref]}, i64 {self._new(f'mul i64 {i}, {stride}')}") if stride else at[ref]
        body(lanes, here)
        self._loop_end(i, label, end, step)

    def _loop_begin(self, length: int, step: int, begin: int = 0) -> tuple[str, str]:
        label, before = self._fresh("loop"), self._label
        self._line(f"br label %{label}")
        self._begin(label)
        i = f"%i{next(self._count)}"
        self._lines.append(f"  {i} = phi i64 [{begin}, %{before}], [{i}.next, %{label}.latch]")
        return i, label

    def _loop_end(self, i: str, label: str, length: int, step: int) -> None:
        self._line(f"br label %{label}.latch")
        self._begin(f"{label}.latch")
        self._lines.append(f"  {i}.next = add nuw nsw i64 {i}, {step}")
        more = self._new(f"icmp ult i64 {i}.next, {length}")
        self._line(f"br i1 {more}, label %{label}, label %{label}.end")
        self._begin(f"{label}.end")

    def _body(
        self, group: Group, sources: list[list[Any]], lanes: int, at: dict[Ref, str], loads: tuple[Ref, ...], stores: frozenset[Ref], steps: Any
    ) -> None:
        lane = Lanes(self._new, lanes)
        loaded: dict[Ref, str] = {}
        for ref in loads:
            dtype: Any = ref.dtype
            kind = memory_type(dtype)
            if lanes and steps[ref][-1] == 0:
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
                    operands.append(lane.truth(value, each.dtype) if dtype.kind == "b" else lane.cast(value, each.dtype, dtype))
                else:
                    operands.append(lane.constant(each, dtype))
            value = self._computed(lane, row, operands)
            values.append(value)
            if row.result in stores:
                target: Any = row.result.dtype
                if target.kind == "b":
                    value = self._new(f"zext {lane.of('i1')} {value} to {lane.of('i8')}")
                self._line(f"store {lane.of(memory_type(target))} {value}, ptr {at[row.result]}, align 1")

    # ---------------------------------------------------------------- calls of loops

    def _loop_call(self, item: LoopCall) -> None:
        if "%pointers" not in "".join(self._head):
            self._head.append("  %pointers = alloca [8 x ptr]")
        result = item.operands[-1]
        addresses = [self._at(self._address(self._native.locations[ref].root), self._native.locations[ref].offset) if ref is result else self._place(ref) for ref in item.operands]
        if item.first == "zero":
            self._line(f"call void @llvm.memset.p0.i64(ptr {addresses[-1]}, i8 0, i64 {result.nbytes}, i1 false)")
        ends = []
        for length, moves in item.outer:
            i, label = self._loop_begin(length, 1)
            ends.append((i, label, length))
            addresses = [
                self._new(f"getelementptr i8, ptr {address}, i64 {self._new(f'mul i64 {i}, {move}')}") if move else address
                for address, move in zip(addresses, moves, strict=True)
            ]
        for place, address in enumerate(addresses):
            self._line(f"store ptr {address}, ptr {self._at('%pointers', 8 * place)}")
        key = item.ufunc.__name__, item.types
        function, data = self._entry(("loop", *key)), self._entry(("loop data", *key))
        self._line(f"call void {function}(ptr %pointers, ptr {self._numbers(item.dimensions)}, ptr {self._numbers(item.steps)}, ptr {data})")
        for i, label, length in reversed(ends):
            self._loop_end(i, label, length, 1)

    # ---------------------------------------------------------------- flags and the end

    def _clear_flags(self) -> None:
        self._head += ["  %control = alloca i32", "  %flags = alloca i32", "  store i32 0, ptr %flags"]
        self._line("call void @llvm.x86.sse.stmxcsr(ptr %control)")
        now = self._new("load i32, ptr %control")
        self._line(f"store i32 {self._new(f'and i32 {now}, {~0x3F}')}, ptr %control")
        self._line("call void @llvm.x86.sse.ldmxcsr(ptr %control)")

    def _collect_flags(self, errors: tuple[tuple[str, str], ...]) -> None:
        """Note the flags that are set; those that the calls ignore are cleared."""
        handled = dict(errors)
        around = sum([bit for name, bit in FLAGS.items() if name not in handled])
        always = sum([bit for name, bit in FLAGS.items() if handled.get(name, "ignore") != "ignore"])
        self._line("call void @llvm.x86.sse.stmxcsr(ptr %control)")
        now = self._new("load i32, ptr %control")
        before = self._new("load i32, ptr %flags")
        found = self._new(f"and i32 {now}, {around}")
        if always:
            sure = self._new(f"shl i32 {self._new(f'and i32 {now}, {always}')}, {ALWAYS}")
            found = self._new(f"or i32 {found}, {sure}")
        self._line(f"store i32 {self._new(f'or i32 {before}, {found}')}, ptr %flags")
        if errors:
            self._line(f"store i32 {self._new(f'and i32 {now}, {~0x3F}')}, ptr %control")
            self._line("call void @llvm.x86.sse.ldmxcsr(ptr %control)")

    def _finish(self, result: str, gives_back: bool, has_items: bool) -> None:
        if gives_back:
            place = self.table["scratch",]
            own = self._new("icmp eq ptr %borrowed, null")
            self._line(f"br i1 {own}, label %keep, label %release")
            self._begin("keep")
            self._line(f"store ptr %scratch, ptr getelementptr (i64, ptr @table, i64 {place})")
            self._line("br label %ended")
            self._begin("release")
            self._call("void", "PyMem_RawFree", "ptr %borrowed")
            self._line("br label %ended")
            self._begin("ended")
        if has_items:
            flags = self._new("load i32, ptr %flags")
            some = self._new(f"icmp ne i32 {flags}, 0")
            self._line(f"br i1 {some}, label %flagged, label %done")
            self._begin("flagged")
            wide = self._new(f"zext i32 {flags} to i64")
            number_ = self._call("ptr", "PyLong_FromLong", f"i64 {wide}")
            told = self._call("ptr", "PyObject_CallOneArg", f"ptr {self._entry(('object', 'is_told'))}", f"ptr {number_}")
            self._call("void", "Py_DecRef", f"ptr {number_}")
            none = self._new(f"icmp eq ptr {told}, null")
            self._line(f"br i1 {none}, label %back, label %asked")
            self._begin("asked")
            self._call("void", "Py_DecRef", f"ptr {told}")
            is_true = self._new(f"icmp eq ptr {told}, {self._entry(('object', 'True'))}")
            self._line(f"br i1 {is_true}, label %back, label %done")
            self._begin("done")
        self._line(f"ret ptr {result}")
        self._begin("back")
        self._call("void", "Py_DecRef", f"ptr {result}")
        self._line("br label %other")
        self._begin("other")
        function = self._entry(("object", "fallback"))
        found = self._call("ptr", "PyObject_Vectorcall", f"ptr {function}", "ptr %args", "i64 %count", "ptr null")
        self._line(f"ret ptr {found}")


def _cost(item: Item) -> float:
    """Estimated nanoseconds."""
    if isinstance(item, LoopCall):
        return 20.0 + math.prod(item.dimensions) * math.prod([length for length, _ in item.outer]) * 0.5
    return math.prod(item.shape) * len(item.rows) * 0.1


def _is_same_layout(one: Ref, other: Ref) -> bool:
    return one.shape == other.shape and one.strides == other.strides and one.dtype == other.dtype


def _offsets(ref: Ref) -> list[int]:
    """Bytes from the first element to each, in the order of the elements."""
    total = np.zeros(ref.shape or (), np.int64)
    for axis, (length, stride) in enumerate(zip(ref.shape or (), ref.strides or (), strict=True)):
        total += (np.arange(length) * stride).reshape((-1,) + (1,) * (len(ref.shape or ()) - axis - 1))
    return list(map(int, total.ravel()))


def _places(ref: Ref, offset: int, whole: Ref) -> list[int]:
    """The places in `whole` of the elements of a view of it."""
    by_offset = {each: place for place, each in enumerate(_offsets(whole))}
    return [by_offset[offset + each] for each in _offsets(ref)]


def _span(ref: Ref) -> tuple[int, int]:
    """The bytes, from the first element, that an array lies in."""
    dtype: Any = ref.dtype
    if not math.prod(ref.shape or ()):
        return 0, 0
    extents = [stride * (length - 1) for length, stride in zip(ref.shape or (), ref.strides or (), strict=True)]
    return sum(min(each, 0) for each in extents), sum(max(each, 0) for each in extents) + dtype.itemsize


def _broadcast_strides(ref: Ref, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides with which an array takes part in a loop over `shape`."""
    own, strides = ref.shape or (), ref.strides or ()
    missing = len(shape) - len(own)
    return (0,) * missing + tuple([0 if length == 1 else stride for length, stride in zip(own, strides, strict=True)])


def _walk(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Axes, the slowest first, with neighbours that lie in a row put together; for each operand its stride along them."""
    axes = [axis for axis in range(len(shape)) if shape[axis] != 1]
    by = strides[-1] if strides else ()
    axes.sort(key=lambda axis: -abs(by[axis]))
    lengths: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        if lengths and all([own[-1] == each[axis] * shape[axis] for own, each in zip(found, strides, strict=True)]):
            lengths[-1] *= shape[axis]
            for own, each in zip(found, strides, strict=True):
                own[-1] = each[axis]
            continue
        lengths.append(shape[axis])
        for own, each in zip(found, strides, strict=True):
            own.append(each[axis])
    return lengths, found
