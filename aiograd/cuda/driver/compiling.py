"""From a kernel in numba's language to machine code for one kind of device, on any machine.

Note [Why not PTX]
    PTX carries the version of the compiler that wrote it, and a driver older than that compiler refuses it, a minor version being
    enough. So the compiler's intermediate code is linked by nvJitLink into machine code, which a driver of the same major version
    loads. Nothing here asks for a device or a context: code for a device is compiled and inspected on machines without one.

Note [Multiply and add]
    A kernel that says ``kernel.contract = False`` has its multiplications and additions rounded one by one; any other may have them fused.

Rejected: numba's dispatcher (``cuda.jit``) and its overloads: it owns a context, converts arguments at several times the cost of a launch,
and how to get at its kernels is not part of its interface; cuda.core's Linker (its option for contraction is refused by the compiler).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import nvjitlink
from numba import cuda, types

from aiograd.cuda.driver.signature import signature_of
from aiograd.errors import DeviceError

#: a section of constants exists for each kernel and for nothing else
_ENTRY = re.compile(rb"\.nv\.constant0\.([^\0]+)\0")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel for one kind of device."""

    #: of the function in the module
    name: str
    cubin: bytes


def compile_kernel(kernel: Callable[..., None], args: tuple[Any, ...], capability: tuple[int, int]) -> MachineCode:
    """Compile a kernel.

    Args:
        kernel: a plain function in numba's language.
        args: the arguments of a launch; only their types count.
        capability: the compute capability of the device.

    Raises:
        DeviceError: numba cannot type or lower it, or it could not be linked; the reason is chained.
    """
    signature = signature_of(args)
    try:
        parts, _ = cuda.compile_all(kernel, types.void(*signature), device=False, abi="numba", output="ltoir", cc=capability)
        cubin = link(parts, capability, contract=getattr(kernel, "contract", True))
    except Exception as error:  # numba raises errors of many types
        target = f"sm_{capability[0]}{capability[1]}"
        raise DeviceError(f"kernel {kernel.__name__} could not be compiled for {signature} on {target}: {error}") from error
    names = set(_ENTRY.findall(cubin))
    if len(names) != 1:
        raise DeviceError(f"kernel {kernel.__name__}: the linked module should hold one kernel, it holds {len(names)}")
    return MachineCode(names.pop().decode(), cubin)


def link(parts: Sequence[Any], capability: tuple[int, int], *, contract: bool) -> bytes:
    """Link intermediate code into machine code.

    Args:
        parts: intermediate code of the kernel, and of functions of the toolkit's headers that it calls (half precision has some).

    Raises:
        nvJitLinkError: it could not be linked.
    """
    options = [f"-arch=sm_{capability[0]}{capability[1]}", "-lto", f"-fma={int(contract)}"]
    handle = nvjitlink.create(len(options), options)
    try:
        for number, part in enumerate(parts):
            code = getattr(part, "code", part)
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), f"part {number}")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        error.add_note(log.split(b"\0")[0].decode(errors="replace").strip())
        raise
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)
