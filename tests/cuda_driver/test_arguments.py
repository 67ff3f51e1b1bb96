"""The layout of a launch's arguments: read back the way a driver reads them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.cuda.driver.arguments import Arguments
from aiograd.cuda.driver.protocol import Pointer
from aiograd.errors import DeviceError
from tests.support import assert_raises

CASES: list[tuple[Any, Any, Any]] = [
    (7, ctypes.c_int64, 7),
    (-(2**62), ctypes.c_int64, -(2**62)),
    (2.5, ctypes.c_double, 2.5),
    (True, ctypes.c_uint8, 1),
    (np.False_, ctypes.c_uint8, 0),
    (np.float32(0.1), ctypes.c_float, float(np.float32(0.1))),
    (np.float64(0.1), ctypes.c_double, 0.1),
    (np.int32(-5), ctypes.c_int32, -5),
    (np.uint64(2**63), ctypes.c_uint64, 2**63),
    (np.int8(-1), ctypes.c_int8, -1),
    (np.uint16(65535), ctypes.c_uint16, 65535),
    (Pointer(SimpleNamespace(address=4096), 24, np.dtype("f4"), 3), ctypes.c_void_p, 4120),
]


def read(arguments: Arguments, number: int, kind: Any) -> Any:
    """The value that the driver finds behind the address at a position."""
    address = ctypes.c_void_p.from_address(arguments.parameters + 8 * number).value
    return kind.from_address(address).value


@pytest.mark.parametrize(("value", "kind", "expected"), CASES)
def test_each_type_is_found_where_its_address_points(value: Any, kind: Any, expected: Any) -> None:
    args = (1, value, 2)
    arguments = Arguments(args)
    arguments.fill(args)
    assert [read(arguments, 0, ctypes.c_int64), read(arguments, 2, ctypes.c_int64)] == [1, 2]
    assert read(arguments, 1, kind) == expected


def test_half_precision() -> None:
    args = (np.float16(1.5),)
    arguments = Arguments(args)
    arguments.fill(args)
    assert read(arguments, 0, ctypes.c_uint16) == np.float16(1.5).view(np.uint16)


def test_the_next_launch_overwrites_the_last() -> None:
    arguments = Arguments((1, 2.0))
    for number in range(3):
        arguments.fill((number, number / 2))
        assert (read(arguments, 0, ctypes.c_int64), read(arguments, 1, ctypes.c_double)) == (number, number / 2)


def test_no_arguments() -> None:
    Arguments(()).fill(())


@pytest.mark.parametrize("value", [1j, np.complex64(1), "x", None, np.zeros(3), np.longdouble(1)])
def test_what_kernels_do_not_take(value: Any) -> None:
    assert_raises(DeviceError, "a kernel was given", Arguments, (value,))
