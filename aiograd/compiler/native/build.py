"""ArrayCode to a native function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Ref
from aiograd.compiler.native.cache import code_cache
from aiograd.compiler.native.check import CheckedEmitter, CheckedFunction, is_checked
from aiograd.compiler.native.emit import Emitter
from aiograd.compiler.native.item_code import ALIGNMENT
from aiograd.compiler.native.items import NativeCode
from aiograd.compiler.native.lowering import lowered
from aiograd.compiler.native.machine import LoadedCode
from aiograd.compiler.native.objects import builtin_function, function_address, is_told
from aiograd.compiler.native.ufuncs import loop_addresses

NAME = "aiograd_native"


@dataclass(eq=False)
class NativeText:
    """The text of a native function and what its table has to hold.

    Attributes:
        sizes: lengths, strides, offsets and numbers of a text without them, see `aiograd.compiler.native.writer`.
        checked: the emitter of a function with checks; None: it has none.
        was_kept: True if its machine code was there when the function was loaded, see `aiograd.compiler.native.cache`.
    """

    native: NativeCode
    text: str
    table: dict[Any, int]
    scratch_bytes: int
    sizes: list[int] = field(default_factory=list)
    checked: CheckedEmitter | None = None
    was_kept: bool = False


def native_text(
    code: ArrayCode, written: frozenset[Ref] = frozenset(), updates: tuple[tuple[Ref, Ref], ...] = (), *, is_dynamic: bool = False
) -> NativeText:
    """The text of a native function; arguments as for `lowered`, and for `Emitter`. A pure function, but for ``AIOGRAD_NATIVE_CHECK``.

    Raises:
        Unsupported: the code has a call that a native function cannot make.
    """
    native = lowered(code, written, updates)
    emitter = (CheckedEmitter if is_checked() else Emitter)(native, NAME, is_dynamic=is_dynamic)
    text = emitter.text()
    checked = emitter if isinstance(emitter, CheckedEmitter) else None
    return NativeText(native, text, emitter.table, emitter.scratch_bytes, emitter.sizes, checked)


def load_native(text: NativeText, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The native function.

    Args:
        text: of it.
        fallback: the numpy function of the same code.
    """
    code, text.was_kept = code_cache.code_of(text.text)
    loaded = LoadedCode(code)
    address = loaded.address_of("table")
    table = (ctypes.c_uint64 * max(len(text.table), 1)).from_address(address)
    if text.sizes:
        words = np.array([size & (1 << 64) - 1 for size in text.sizes], np.uint64)
        ctypes.memmove(loaded.address_of("sizes"), words.ctypes.data, words.nbytes)
    kept: list[Any] = [loaded, fallback, text.native.constants]
    scratch = None
    for key, place in text.table.items():
        if key == ("scratch",):
            scratch = _aligned(text.scratch_bytes)
            kept.append(scratch)
            table[place] = scratch[1]
        else:
            table[place] = _entry(key, text, fallback, kept)
    function = builtin_function(text.native.code.name, loaded.address_of(NAME), kept)
    return function if text.checked is None else CheckedFunction(text.native.code.name, function, text.checked, table, scratch)


def _aligned(size: int) -> tuple[Any, int]:
    """Memory, and the first address in it that numpy's large arrays may have too."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    return memory, -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT


def _entry(key: Any, text: NativeText, fallback: Any, kept: list[Any]) -> int:
    kind, *name = key
    if kind == "function":
        return function_address(name[0])
    if kind == "type":
        return id({"ndarray": np.ndarray, "list": list}[name[0]])
    if kind == "object":
        return id({"None": None, "True": True, "is_told": is_told, "fallback": fallback}[name[0]])
    if kind == "dtype":
        dtype = np.dtype(name[0])
        kept.append(dtype)
        return id(dtype)
    if kind in ("loop", "loop data"):
        return loop_addresses(getattr(np, name[0]), name[1])[kind == "loop data"]
    if kind == "constant":
        return id(text.native.constants[name[0]])
    if kind == "data":
        return int(text.native.constants[name[0]].ctypes.data)
    if kind in ("low", "high", "failed check"):  # filled by every call
        return 0
    raise AssertionError(key)
