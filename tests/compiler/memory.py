"""The function that compares memory, made with llvmlite, for tests."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest

from aiograd.compiler import memory_guards


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


@functools.cache
def compare_function() -> Callable[..., bool]:
    """The built-in function of `memory_guards.TEXT`; skips the test where it cannot be made."""
    llvm: Any = pytest.importorskip("llvmlite.binding")
    if memory_guards.layout_problem() is not None:
        pytest.skip(str(memory_guards.layout_problem()))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(memory_guards.TEXT)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault"))
    engine.finalize_object()
    definition = _MethodDef(b"unchanged", engine.get_function_address(memory_guards.NAME), 0x80, None)
    make = ctypes.pythonapi.PyCMethod_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
    function: Callable[..., bool] = make(ctypes.addressof(definition), (engine, definition), None, None)
    return function
