"""ArrayCode to a native function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Ref
from aiograd.compiler.native.cache import code_cache
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
        was_kept: True if its machine code was there when the function was loaded, see `aiograd.compiler.native.cache`.
    """

    native: NativeCode
    text: str
    table: dict[Any, int]
    scratch_bytes: int
    was_kept: bool = False


def native_text(code: ArrayCode, written: frozenset[Ref] = frozenset()) -> NativeText:
    """The text of a native function; arguments as for `lowered`. A pure function.

    Raises:
        Unsupported: the code has a call that a native function cannot make.
    """
    native = lowered(code, written)
    emitter = Emitter(native, NAME)
    text = emitter.text()
    return NativeText(native, text, emitter.table, emitter.scratch_bytes)


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
    kept: list[Any] = [loaded, fallback, text.native.constants]
    for key, place in text.table.items():
        table[place] = _entry(key, text, fallback, kept)
    return builtin_function(text.native.code.name, loaded.address_of(NAME), kept)


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
    if kind == "scratch":
        memory = np.empty(text.scratch_bytes + ALIGNMENT, np.uint8)
        kept.append(memory)
        return -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
    raise AssertionError(key)
