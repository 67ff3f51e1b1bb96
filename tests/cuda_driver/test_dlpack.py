"""Capsules: numpy reads ours and we read numpy's, so that the layout is checked by somebody else's code."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from aiograd.cuda import dlpack
from aiograd.cuda.dlpack import CPU, CUDA, Strided, make_capsule, open_capsule
from aiograd.errors import ArgumentError, DeviceError
from tests.support import assert_raises

VERSIONS = [None, (0, 8), (1, 0), (1, 3)]


class Owner:
    """Holds an array's memory."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array


class Exporter:
    """The protocol of numpy's from_dlpack."""

    def __init__(self, array: np.ndarray[Any, Any], version: tuple[int, int] | None = None, **options: Any) -> None:
        self.array, self.version, self.options = array, version, options
        self.owner = Owner(array)

    def strided(self, device: tuple[int, int] = (CPU, 0)) -> Strided:
        array = self.array
        return Strided(array.ctypes.data, array.shape, array.strides, array.dtype, device, self.owner, not array.flags.writeable)

    def __dlpack__(self, **asked: Any) -> Any:
        return make_capsule(self.strided(), max_version=self.version, **self.options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)


ARRAYS = [
    np.arange(24.0).reshape(2, 3, 4), np.arange(24, dtype=np.float32).reshape(4, 6)[::-1, 1::2], np.arange(12, dtype=np.int8).reshape(3, 4).T,
    np.array(3.5), np.zeros((0, 5), np.float16), np.array([True, False]), np.array([1 + 2j, 3]),
    np.broadcast_to(np.arange(3, dtype=np.uint16), (2, 3)), np.arange(5, dtype=np.int64),
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_numpy_reads_what_we_hand_out(array: np.ndarray[Any, Any], version: tuple[int, int] | None) -> None:
    array = array if array.flags.writeable or version in VERSIONS[2:] else array.copy()
    read = np.from_dlpack(Exporter(array, version))
    assert read.dtype == array.dtype and read.shape == array.shape
    assert np.array_equal(read, array)
    assert array.size == 0 or read.ctypes.data == array.ctypes.data, "the same memory"


def test_numpy_is_told_what_is_read_only() -> None:
    array = np.arange(3.0)
    assert np.from_dlpack(Exporter(array, (1, 0))).flags.writeable
    array.flags.writeable = False
    assert not np.from_dlpack(Exporter(array, (1, 0))).flags.writeable
    assert_raises(ArgumentError, "read-only", lambda: np.from_dlpack(Exporter(array)))


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("array", [a for a in ARRAYS if a.flags.writeable], ids=lambda a: f"{a.dtype}{a.shape}")
def test_we_read_what_numpy_hands_out(array: np.ndarray[Any, Any], version: tuple[int, int] | None) -> None:
    found = open_capsule(array.__dlpack__(max_version=version))
    assert (found.shape, found.dtype, found.device) == (array.shape, array.dtype, (CPU, 0))
    before, behind = found.span()
    if array.size:
        assert found.address == array.ctypes.data
        low, high = np.lib.array_utils.byte_bounds(array)
        assert (found.address - before, found.address + behind) == (low, high)
        if array.ndim:
            assert all(s == t for s, t, n in zip(found.strides, array.strides, array.shape, strict=True) if n > 1)


def test_we_read_what_numpy_says_is_read_only() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert open_capsule(array.__dlpack__(max_version=(1, 0))).is_read_only


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_ours_come_back(version: tuple[int, int] | None) -> None:
    exporter = Exporter(np.arange(12.0).reshape(3, 4)[:, ::2])
    sent = exporter.strided((CUDA, 3))
    got = open_capsule(make_capsule(sent, max_version=version))
    assert (got.address, got.shape, got.strides, got.dtype, got.device) == (sent.address, sent.shape, sent.strides, sent.dtype, (CUDA, 3))


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("how", ["read", "taken", "never opened", "on a thread"])
def test_the_owner_is_kept_as_long_as_needed_and_no_longer(version: tuple[int, int] | None, how: str) -> None:
    released: list[int] = []
    before = len(dlpack._exported)
    exporter = Exporter(np.arange(3.0), version, released=lambda: released.append(1))
    owner = weakref.ref(exporter.owner)
    held: Any = np.from_dlpack(exporter) if how == "read" else exporter.__dlpack__()
    if how in ("taken", "on a thread"):
        held = open_capsule(held)
    del exporter
    gc.collect()
    assert owner() is not None and not released
    if how == "on a thread":
        box = [held]
        del held
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
    else:
        del held
    gc.collect()
    assert owner() is None and released == [1] and len(dlpack._exported) == before


def test_numpys_memory_is_given_back() -> None:
    array = np.arange(3.0)
    owner = Owner(array)
    view = np.asarray(owner.array)[:]
    reference = weakref.ref(owner.array)
    found = open_capsule(view.__dlpack__())
    del array, view, owner
    gc.collect()
    assert reference() is not None
    assert (ctypes.c_double * 3).from_address(found.address)[2] == 2.0
    del found
    gc.collect()
    assert reference() is None


def test_a_capsule_is_opened_once() -> None:
    capsule = np.arange(3).__dlpack__()
    open_capsule(capsule)
    assert_raises(ArgumentError, "opened already", open_capsule, capsule)
    assert_raises(ArgumentError, "expected a DLPack capsule, got list", open_capsule, [])


def test_what_dlpack_cannot_say() -> None:
    assert_raises(ArgumentError, r"dtype datetime64", lambda: Exporter(np.zeros(2, "M8[s]")).__dlpack__())
    uneven = np.zeros(3, [("a", "i1"), ("b", "f4")])["b"]
    assert_raises(ArgumentError, r"strides \(5,\) bytes", lambda: Exporter(uneven).__dlpack__())


def test_what_numpy_cannot_say() -> None:
    for code, bits, lanes in ((2, 32, 4), (4, 16, 1), (2, 8, 1), (0, 4, 1), (9, 8, 1)):
        capsule = Exporter(np.arange(3.0)).__dlpack__()
        address = dlpack._pointer_of(id(capsule), b"dltensor")
        managed = dlpack._Managed.from_address(address)
        managed.tensor.dtype = dlpack._DataType(code, bits, lanes)
        assert_raises(DeviceError, f"kind {code} with {bits} bits and {lanes} lanes", open_capsule, capsule)


def test_a_version_from_the_future() -> None:
    capsule = Exporter(np.arange(3.0), (1, 0)).__dlpack__()
    dlpack._Versioned.from_address(dlpack._pointer_of(id(capsule), b"dltensor_versioned")).version.major = 2
    assert_raises(DeviceError, "DLPack version is 2.0", open_capsule, capsule)


def test_no_strides_mean_c_order() -> None:
    capsule = Exporter(np.arange(24.0).reshape(2, 3, 4)).__dlpack__()
    managed = dlpack._Managed.from_address(dlpack._pointer_of(id(capsule), b"dltensor"))
    managed.tensor.strides = None
    managed.tensor.byte_offset = 8
    address = managed.tensor.data
    found = open_capsule(capsule)
    assert found.strides == (96, 32, 8) and found.address == address + 8
