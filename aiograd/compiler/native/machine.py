"""Text of LLVM to machine code: the only module of the compiler that uses llvmlite."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

#: the first version with pointers without types
LLVM = 16
#: LLVM is used by one thread at a time
_LOCK = threading.Lock()


def _unlock() -> None:
    """Take the lock from a thread that a forked child does not have."""
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@functools.cache
def llvm_problem() -> str | None:
    """Why there is no LLVM here; None if there is."""
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite is not installed (the extra `kernels`)"
    if llvm.llvm_version_info[0] < LLVM:
        return f"llvmlite {llvmlite.__version__} does not know pointers without types; expected 0.45 or later, which numba 0.62 brings"
    try:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        llvm.check_jit_execution()
    except (RuntimeError, OSError) as error:
        return f"LLVM cannot run code here: {error}"
    return None


@functools.cache
def _target() -> Any:
    import llvmlite.binding as llvm

    llvm_problem()
    features = ",".join([f"{'+' if present else '-'}{name}" for name, present in sorted(llvm.get_host_cpu_features().items())])
    target, cpu = llvm.Target.from_default_triple(), llvm.get_host_cpu_name()
    return target.create_target_machine(cpu=cpu, features=features, opt=1, codemodel="jitdefault", jit=True)


def target_name() -> str:
    """The CPU and the version of LLVM that code is made for."""
    import llvmlite
    import llvmlite.binding as llvm

    features = ",".join([name for name, present in sorted(llvm.get_host_cpu_features().items()) if present])
    return f"{llvmlite.__version__} {llvm.llvm_version_info} {llvm.get_process_triple()} {llvm.get_host_cpu_name()} {features}"


def object_code(text: str) -> bytes:
    """The machine code of a text, as an object file."""
    import llvmlite.binding as llvm

    with _LOCK:
        module = llvm.parse_assembly(text)
        module.triple = llvm.get_process_triple()
        code: bytes = _target().emit_object(module)
    return code


class LoadedCode:
    """Machine code in memory, until it is no longer used.

    Args:
        code: an object file.

    Attributes:
        address_of: the address of a function or variable, by name.
    """

    def __init__(self, code: bytes) -> None:
        import llvmlite.binding as llvm

        with _LOCK:
            self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _fresh_target())
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()

    def address_of(self, name: str) -> int:
        """The address of a function or variable."""
        return int(self._engine.get_function_address(name) or self._engine.get_global_value_address(name))


def _fresh_target() -> Any:
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
