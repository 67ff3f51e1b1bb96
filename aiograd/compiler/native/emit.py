"""NativeCode to a text of LLVM: a function with the calling convention of built-in functions of CPython.

Note [The function]
    It takes the parameters of its `ArrayCode`, arrays or tuples of arrays, and returns its results. First it looks that every argument is a plain
    array, aligned to its elements, and makes the arrays that it returns; then it computes; then it looks at the flags of floating-point errors.
    Where something is otherwise than expected it calls the numpy function of the same code, with the same arguments, which warns or raises as that
    does: it has changed nothing by then but memory that the numpy function writes first.
    Addresses are no part of the text. They lie in `table`, which is filled when the function is loaded; so the text is the same in every process.
"""

from __future__ import annotations

import math
from typing import Any

from aiograd.compiler.calls import ARENA, Ref
from aiograd.compiler.native.item_code import ALIGNMENT, DATA
from aiograd.compiler.native.items import Item, Location, LoopCall, NativeCode, PickedElements, Root, RootKind
from aiograd.compiler.native.layouts import span
from aiograd.compiler.native.roll_code import RollWriter
from aiograd.compiler.native.rolling import home_of, is_same_layout

#: arguments that are looked at or handed on by a loop
MANY = 8
#: estimated nanoseconds from which on the interpreter's lock is released
RELEASE_NS = 50_000

#: offsets in objects of CPython, see `aiograd.compiler.native.objects.layout_problem`
TYPE, ITEMS = 8, 24
#: offsets in an array, and its flags: it may be written and lies in order; it owns its memory; see `memory_guards.layout_problem`
NDIM, SHAPE, BASE, DTYPE, ARRAY_FLAGS, WRITEABLE, OWNS = 24, 32, 48, 56, 64, 0x501, 0x004


class Emitter(RollWriter):
    """Writes the text of one function.

    Args:
        native: the function as data.
        name: of the function.
        is_dynamic: True for a text without sizes.
    """

    #: bytes of memory that the function takes from the stack; more comes from a buffer of its own
    stack_bytes = 4096

    def __init__(self, native: NativeCode, name: str, *, is_dynamic: bool = False) -> None:
        super().__init__(native, is_dynamic=is_dynamic)
        self._name = name
        self._made: dict[Root, str] = {}
        #: results that a loop has made
        self._looped: set[Root] = set()
        #: the state of the thread, where the interpreter's lock is released
        self._state = ""
        #: the object that is returned, once it is there
        self._outer = ""

    # ---------------------------------------------------------------- the function

    def text(self) -> str:
        """The text."""
        native = self._native
        for number_, item in enumerate(native.items):
            self._roots.append(list(dict.fromkeys([native.locations[ref].root for ref in (*item.reads(), *item.writes())])))
            self._last.update(dict.fromkeys(self._roots[-1], number_))
        for _, value in native.updates:
            self._last[native.locations[value].root] = len(native.items)
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
            self._has_stack_flags = any([isinstance(item, LoopCall) and item.ufunc.__name__ not in ("add", "matmul") for item in native.items])
            self._clear_flags()
        self._state = self._call("ptr", "PyEval_SaveThread") if releases else ""
        self._all_items()
        if self._is_open:
            self._collect_flags(self._errors)
        if releases:
            self._call("void", "PyEval_RestoreThread", f"ptr {self._state}")
        if self._fence_bytes:
            self._head.append(f"  %fence = alloca [{self._fence_bytes} x i8], align {ALIGNMENT}")
        scratch = self._scratch(body)
        self._finish(result, bool(scratch), bool(native.items))
        return self._assembled()

    def _assembled(self) -> str:
        lines = [
            f"@table = global [{max(len(self.table), 1)} x i64] zeroinitializer", *self._globals, *sorted(self._intrinsics),
            *([f"@sizes = global [{len(self.sizes)} x i64] zeroinitializer"] if self.sizes else []),
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)", "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
            "declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)",
            f"define ptr @{self._name}(ptr %self, ptr %args, i64 %count) {{", "entry:", *self._head, *self._lines, "}",
        ]
        return "\n".join(lines) + "\n"

    def _take_arguments(self) -> None:
        """Load the addresses of objects, and look that they are plain arrays."""
        code = self._native.code
        used = {each.root.path for each in self._native.locations.values() if each.root.kind is RootKind.ARGUMENT}
        self._ndarray = self._entry(("type", "ndarray"))
        arrays = [(i, each) for i, each in enumerate(code.parameters) if isinstance(each, Ref) and (i, -1) in used and each.dtype is not None]
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

    def _leave_if_unlike(self, array: str, ref: Ref) -> None:
        """Leave for numpy's function unless this is a plain array of this dtype and shape that may be written and lies in order.

        The array itself owns its memory, or a plain array that it is a view of.
        """
        shape = ref.shape or ()
        kind = self._new(f"icmp ne ptr {self._new(f'load ptr, ptr {self._at(array, DTYPE)}')}, {self._entry(('dtype', ref.dtype.str))}")  # type: ignore[union-attr]
        flags = self._new(f"and i32 {self._new(f'load i32, ptr {self._at(array, ARRAY_FLAGS)}')}, {WRITEABLE}")
        axes = self._new(f"load i32, ptr {self._at(array, NDIM)}")
        bad = self._is_no_array(array, ref)
        base = self._new(f"load ptr, ptr {self._at(array, BASE)}")
        owner = self._new(f"select i1 {self._new(f'icmp eq ptr {base}, null')}, ptr {array}, ptr {base}")
        other = self._new(f"icmp ne ptr {self._new(f'load ptr, ptr {self._at(owner, TYPE)}')}, {self._ndarray}")
        for each in (kind, other, self._new(f"icmp ne i32 {flags}, {WRITEABLE}"), self._new(f"icmp ne i32 {axes}, {len(shape)}")):
            bad = self._new(f"or i1 {bad}, {each}")
        like = self._fresh("like")
        self._line(f"br i1 {bad}, label %other, label %{like}")
        self._begin(like)
        owns = self._new(f"and i32 {self._new(f'load i32, ptr {self._at(owner, ARRAY_FLAGS)}')}, {OWNS}")
        bad = self._new(f"icmp eq i32 {owns}, 0")
        for place, length in enumerate(shape):
            like = self._fresh("like")
            self._line(f"br i1 {bad}, label %other, label %{like}")
            self._begin(like)
            lengths = self._new(f"load ptr, ptr {self._at(array, SHAPE)}")
            bad = self._new(f"icmp ne i64 {self._new(f'load i64, ptr {self._at(lengths, 8 * place)}')}, {self._size(length)}")
        like = self._fresh("like")
        self._line(f"br i1 {bad}, label %other, label %{like}")
        self._begin(like)

    def _check_items(self, items: str, refs: list[tuple[int, Ref]]) -> str:
        """True at run time if one of these items is no plain array; by a loop where there are many."""
        if not refs:
            return "false"
        if self._native.updates:
            for place, ref in refs:
                self._leave_if_unlike(self._new(f"load ptr, ptr {self._at(items, 8 * place)}"), ref)
            return "false"
        if len(refs) < MANY:
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
        at = self._varying(tuple([place for place, _ in places]), i)
        array = self._new(f"load ptr, ptr {self._new(f'getelementptr ptr, ptr {items}, i64 {at}')}")
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

    # ---------------------------------------------------------------- objects

    def _results(self, tree: Any, owner: Any = None, path: tuple[int, ...] = ()) -> str:
        """Make the object that is returned, with the arrays in it; the name of it.

        Args:
            owner: kind and name of the sequence that it is put into, and the place there.
            path: the way to it.
        """
        if tree.__class__ in (tuple, list):
            kind = "PyTuple" if tree.__class__ is tuple else "PyList"
            made = self._checked(self._call("ptr", f"{kind}_New", f"i64 {len(tree)}"))
            if owner:
                self._call("i32", f"{owner[0]}_SetItem", f"ptr {owner[1]}", f"i64 {owner[2]}", f"ptr {made}")
            handed_on = self._handed_on(tree)
            for (base, items) in handed_on.items():
                self._hand_on(kind, made, base, items)
            done = {i for items in handed_on.values() for i, _ in items} | self._make_many(kind, made, tree, path)
            for i, item in enumerate(tree):
                if item.__class__ in (tuple, list):
                    self._results(item, (kind, made, i), (*path, i))
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
                if location.root.kind is RootKind.ARGUMENT and not location.offset and is_same_layout(item, location.root.ref):
                    parameter, place = location.root.path
                    base, place = (-1, parameter) if place < 0 else (parameter, place)
                    found.setdefault(base, []).append((i, place))
        return {base: items for base, items in found.items() if len(items) >= MANY}

    def _hand_on(self, kind: str, made: str, base: int, items: list[tuple[int, int]]) -> None:
        """Put many arguments into a sequence, by a loop."""
        source = "%args" if base < 0 else self._arguments[base, -2]
        targets, places = self._numbers(tuple([i for i, _ in items])), self._numbers(tuple([place for _, place in items]))
        loop = self._loop_begin(len(items))
        place = self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr {places}, i64 {loop.i}')}")
        target = self._new(f"load i64, ptr {self._new(f'getelementptr i64, ptr {targets}, i64 {loop.i}')}")
        each = self._new(f"load ptr, ptr {self._new(f'getelementptr ptr, ptr {source}, i64 {place}')}")
        self._call("void", "Py_IncRef", f"ptr {each}")
        self._call("i32", f"{kind}_SetItem", f"ptr {made}", f"i64 {target}", f"ptr {each}")
        self._loop_end(loop)

    def _make_many(self, kind: str, made: str, tree: Any, path: tuple[int, ...]) -> set[int]:
        """Make the arrays of a sequence that are new, or views of others, of each layout that many have by a loop; their places."""
        behind = self._at(made, ITEMS)
        self._sequences[path] = behind if kind == "PyTuple" else self._new(f"load ptr, ptr {behind}")
        places = [(i, ref, self._native.locations[ref]) for i, ref in enumerate(tree) if ref.__class__ is Ref]
        done: set[int] = set()
        for is_new in (True, False):
            layouts: dict[Any, list[tuple[int, Ref, Location]]] = {}
            for i, ref, location in places:
                root = location.root
                if is_new:
                    fits = self._returned.get(root) == (path, i) and root not in self._made
                else:
                    is_whole = not location.offset and is_same_layout(ref, root.ref)
                    fits = not is_whole and (root.kind is RootKind.ARGUMENT or root in self._looped)
                if fits:
                    key = ref.shape, ref.strides, ref.dtype, () if is_new else home_of(root, self._returned)
                    layouts.setdefault(key, []).append((i, ref, location))
            for many in [many for many in layouts.values() if len(many) >= MANY]:
                numbers, refs, locations = zip(*many, strict=True)
                loop = self._loop_begin(len(many))
                if is_new:
                    array = self._checked(self._new_array(refs[0], "null"))
                else:
                    whole = self._object(tuple([location.root for location in locations]), loop.i)
                    offset = self._varying(tuple([location.offset for location in locations]), loop.i)
                    data = self._new(f"load ptr, ptr {self._at(whole, DATA)}")
                    array = self._view(refs[0], self._new(f"getelementptr i8, ptr {data}, i64 {offset}"), whole)
                self._call("i32", f"{kind}_SetItem", f"ptr {made}", f"i64 {self._varying(numbers, loop.i)}", f"ptr {array}")
                self._loop_end(loop)
                done.update(numbers)
                self._looped.update([location.root for location in locations] if is_new else ())
        return done

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
            whole = self._made.get(root) or (self._object((root,), "") if root in self._looped else None)
            if whole is None:
                whole = self._made[root] = self._checked(self._new_array(root.ref, "null"))
                self._addresses[root] = self._new(f"load ptr, ptr {self._at(whole, DATA)}")
                if not location.offset and is_same_layout(tree, root.ref):
                    return whole
                fresh = True
            else:
                fresh = False
        else:
            whole = self._argument(root.path) if root.kind is RootKind.ARGUMENT else self._entry(("constant", root.path[0]))
            fresh = False
        if not location.offset and is_same_layout(tree, root.ref):
            self._call("void", "Py_IncRef", f"ptr {whole}")
            return whole
        data = self._behind(self._address(root), location.offset)
        return self._view(tree, data, whole, is_fresh=fresh)

    def _view(self, ref: Ref, data: str, whole: str, *, is_fresh: bool = False) -> str:
        """Make an array that shows the memory of another one."""
        view = self._checked(self._new_array(ref, data))
        if not is_fresh:
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

    def _scratch(self, body: int) -> str:
        """Take the memory to compute in, before everything that uses it."""
        if not self.scratch_bytes:
            return ""
        if self.scratch_bytes <= self.stack_bytes and not self._is_dynamic:
            stack = f"  %stack = alloca [{self.scratch_bytes} x i8], align {ALIGNMENT}"
            self._head += [stack, "  %scratch = getelementptr i8, ptr %stack, i64 0"]
            return ""
        before, self._lines = self._lines[:body], self._lines[body:]
        rest, self._lines = self._lines, before
        kept = self._entry(("scratch",))
        place = self.table["scratch",]
        self._line(f"store ptr null, ptr getelementptr (i64, ptr @table, i64 {place})")
        is_taken = self._new(f"icmp eq ptr {kept}, null")
        self._line(f"br i1 {is_taken}, label %more, label %taken")
        self._begin("more")
        more = self._call("ptr", "PyMem_RawMalloc", f"i64 {self._size(self.scratch_bytes + ALIGNMENT)}")
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

    # ---------------------------------------------------------------- the end

    def _finish(self, result: str, gives_back: bool, has_items: bool) -> None:
        back = "retreat" if gives_back else "back"
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
            self._line(f"br i1 {none}, label %{back}, label %asked")
            self._begin("asked")
            self._call("void", "Py_DecRef", f"ptr {told}")
            is_true = self._new(f"icmp eq ptr {told}, {self._entry(('object', 'True'))}")
            self._line(f"br i1 {is_true}, label %{back}, label %done")
            self._begin("done")
        for target, value in self._native.updates:
            self._update(target, value)
        if gives_back:
            self._give_back()
        self._line(f"ret ptr {result}")
        if gives_back:
            self._begin("retreat")
            self._give_back()
            self._line("br label %back")
        self._begin("back")
        self._call("void", "Py_DecRef", f"ptr {result}")
        self._line("br label %other")
        self._begin("other")
        function = self._entry(("object", "fallback"))
        found = self._call("ptr", "PyObject_Vectorcall", f"ptr {function}", "ptr %args", "i64 %count", "ptr null")
        self._line(f"ret ptr {found}")

    def _update(self, target: Ref, value: Ref) -> None:
        """Write an argument."""
        address = self._where(target)
        if self._is_small(value):
            self._write(target, self._register(value), address)
        elif target.nbytes:
            source = self._place(value)
            self._touch(target, address, *span(target))
            self._line(f"call void @llvm.memcpy.p0.p0.i64(ptr {address}, ptr {source}, i64 {self._size(target.nbytes)}, i1 false)")

    def _give_back(self) -> None:
        """Keep the memory to compute in for the next call, or free it."""
        place = self.table["scratch",]
        own = self._new("icmp eq ptr %borrowed, null")
        keep, release, ended = (self._fresh(label) for label in ("keep", "release", "ended"))
        self._line(f"br i1 {own}, label %{keep}, label %{release}")
        self._begin(keep)
        self._line(f"store ptr %scratch, ptr getelementptr (i64, ptr @table, i64 {place})")
        self._line(f"br label %{ended}")
        self._begin(release)
        self._call("void", "PyMem_RawFree", "ptr %borrowed")
        self._line(f"br label %{ended}")
        self._begin(ended)


def _cost(item: Item) -> float:
    """Estimated nanoseconds."""
    if isinstance(item, LoopCall):
        return 20.0 + math.prod(item.dimensions) * math.prod([length for length, _ in item.outer]) * 0.5
    if isinstance(item, PickedElements):
        return math.prod(item.result.shape or ()) * 1.0
    return math.prod(item.shape) * len(item.rows) * 0.1
