"""The toy device by itself: what is known at once, order, views, faults, statistics, and that it ends when it is closed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, DeviceError, DeviceMismatchError, NotReadyError
from aiograd.ops import ROWS
from aiograd.running import devices
from aiograd.testing import SimulatedLoop
from tests.support import assert_awaiting_raises, assert_raises
from tests.toy_device import ToyDevice, ToyError, ToyMemoryError
from tests.toy_device.array import ToyArray, stand_in


@pytest.fixture
def toy() -> Iterator[ToyDevice]:
    with ToyDevice() as device:
        yield device


def values(array: ToyArray) -> Any:
    return array.owner_device.to_host(array)


# -------------------------------------------------------------------- what is known at once


CALLS = {
    "ufunc": lambda a, b: np.add(a, b),
    "broadcast": lambda a, b: a[:, None] * b,
    "operator with a number": lambda a, b: 2.0 ** -a,
    "comparison": lambda a, b: a > b,
    "reduction": lambda a, b: np.sum(a, axis=0, keepdims=True),
    "ufunc reduce": lambda a, b: np.maximum.reduce(a, axis=1),
    "to a scalar": lambda a, b: np.mean(a),
    "several results": lambda a, b: np.linalg.eigh(a @ a.T),
    "list of arrays": lambda a, b: np.concatenate([a, b], axis=1),
    "result list": lambda a, b: np.split(a, 2, axis=1)[1],
    "basic index": lambda a, b: a[1:, ::-1],
    "array index": lambda a, b: a[np.array([2, 0])],
    "device index": lambda a, b: a[np.argmax(a, axis=0)],
    "reshape of a transpose": lambda a, b: a.T.reshape(-1),
    "astype": lambda a, b: a.astype(np.float32),
    "inverse": lambda a, b: np.linalg.inv(a @ a.T),
    "where": lambda a, b: np.where(a > 0, a, b),
    "host operand": lambda a, b: a + np.arange(4.0),
    "ones like": lambda a, b: np.ones_like(a, shape=(2,)),
}


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("name", CALLS)
def test_shape_and_dtype_are_known_before_anything_runs(name: str, toy: ToyDevice) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    expected = flat(CALLS[name](a, b))
    here, there = toy.from_host(a), toy.from_host(b)
    with toy.held():
        results = flat(CALLS[name](here, there))
        for result, value in zip(results, expected, strict=True):
            value = np.asarray(value)
            assert isinstance(result, ToyArray) and not result.__aiograd_is_ready__()
            assert (result.shape, result.dtype, result.strides) == (value.shape, value.dtype, value.strides)
            assert (result.ndim, result.size, result.nbytes, result.itemsize) == (value.ndim, value.size, value.nbytes, value.itemsize)
    for result, value in zip(results, expected, strict=True):
        assert values(result).tobytes() == np.asarray(value).tobytes()


def test_wrong_shapes_raise_at_the_call(toy: ToyDevice) -> None:
    a, b = toy.from_host(np.ones((2, 3))), toy.from_host(np.ones((2, 4)))
    with toy.held():
        for wrong in (lambda: a + b, lambda: a @ b, lambda: a.reshape(5), lambda: a[5], lambda: a.__setitem__(0, b)):
            assert_raises((ValueError, IndexError), None, wrong)
        assert_raises(TypeError, None, lambda: len(np.sum(a)))
        assert len(a) == 2 and np.shape(a) == (2, 3) and np.result_type(a, np.float32) == np.float64


def test_nothing_is_copied_to_the_host_unasked(toy: ToyDevice) -> None:
    a = toy.from_host(np.ones(3))
    assert_raises(DeviceError, "unasked", np.asarray, a)
    with pytest.raises(DeviceError, match="unasked"):
        np.zeros(3)[:] = a
    assert_raises(TypeError, None, lambda: np.add.at(np.zeros(3), [0], a))
    assert toy.statistics().downloads == 0
    assert float(a[0]) == 1.0 and int(a[1]) == 1 and bool(a[2]) and a[0].item() == 1.0


def test_arrays_of_two_devices_do_not_mix(toy: ToyDevice) -> None:
    with ToyDevice("toy:1") as other:
        assert_raises(DeviceMismatchError, r"add.*toy:0 and toy:1", lambda: toy.from_host(np.ones(2)) + other.from_host(np.ones(2)))


def test_a_stand_in_has_the_layout_of_the_array(toy: ToyDevice) -> None:
    base = toy.from_host(np.arange(24.0).reshape(4, 6))
    for view in (base, base.T, base[::-1, ::2], np.broadcast_to(base[0], (3, 6)), base[:0], base[1, 2]):
        image = stand_in(view)
        assert (image.shape, image.dtype) == (view.shape, view.dtype)
        assert image.size == 0 or image.strides == view.strides


# -------------------------------------------------------------------- order, views, writes


def test_kernels_run_in_order_on_one_thread(toy: ToyDevice) -> None:
    a = toy.from_host(np.ones(2))
    for _ in range(5):
        a = np.negative(np.sin(a))
    values(a)
    assert list(toy.history) == ["from_host", *["sin", "negative"] * 5]
    assert toy.statistics().threads == ("aiograd-toy:0",)
    assert threading.current_thread().name not in toy.statistics().threads


def test_the_host_may_reuse_its_memory_at_once(toy: ToyDevice) -> None:
    memory = np.array([1.0, 2.0])
    index = np.array([1, 0])
    with toy.held():
        a = toy.from_host(memory)
        b = a * memory
        c = a[index]
        a[index] = memory
        memory[:] = 99.0
        index[:] = 0
    assert values(b).tolist() == [1.0, 4.0] and values(c).tolist() == [2.0, 1.0] and values(a).tolist() == [2.0, 1.0]


def test_views_show_what_is_written_to_their_owner(toy: ToyDevice) -> None:
    a = toy.from_host(np.arange(6.0).reshape(2, 3))
    values(a)
    with toy.held():
        row, column, flat_view, copied = a[1], a.T[0], a.reshape(-1), a.T.reshape(-1)
        for view in (row, column, flat_view):
            assert view.base is a
        assert copied.base is None and a.base is None
        a[1, 0] = 30.0
        flat_view[0] = 10.0
        assert not row.__aiograd_is_ready__()
    assert values(row).tolist() == [30.0, 4.0, 5.0] and values(column).tolist() == [10.0, 30.0]
    assert values(copied).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0], "made before the writes"
    np.add(a, 1.0, out=a)
    assert values(a).tolist() == [[11.0, 2.0, 3.0], [31.0, 5.0, 6.0]]


async def test_a_wait_also_waits_for_writes(toy: ToyDevice) -> None:
    a = toy.from_host(np.zeros(2))
    view = a[:1]
    await view.__aiograd_wait__()
    with toy.held():
        a[...] = 5.0
        waiting = asyncio.ensure_future(view.__aiograd_wait__())
        await asyncio.sleep(0)
        assert not waiting.done() and "pending" in repr(view)
        assert_raises(NotReadyError, None, toy.to_host, view)
    await waiting
    assert toy.to_host(view).tolist() == [5.0] and "pending" not in repr(view)


def test_a_result_on_the_devices_own_thread_is_there_at_once(toy: ToyDevice) -> None:
    a = toy.from_host(np.ones(2))

    def rule() -> Any:
        b = np.exp(a)
        assert b.__aiograd_is_ready__()
        b[0] = 0.0
        return b, values(b).tolist(), bool(np.all(b[1:] > 2))

    b, inside, truth = toy.submit(rule).result()
    assert inside == values(b).tolist() == [0.0, np.e] and truth


def test_holding_and_releasing_one_by_one(toy: ToyDevice) -> None:
    toy.hold()
    jobs = [toy.submit(lambda i=i: i) for i in range(4)]
    assert not any(job.done() for job in jobs)
    toy.release(2)
    assert jobs[1].result() == 1 and not jobs[2].done() and toy.statistics().jobs == 2
    jobs[2].cancel()
    toy.release()
    assert jobs[3].result() == 3 and jobs[2].cancelled()


def test_delays_are_drawn_from_the_seed() -> None:
    drawn: list[list[float]] = []
    for seed in (1, 1, 2):
        delays: list[float] = []

        def delay(random: Any, delays: list[float] = delays) -> float:
            delays.append(random.random())
            return 0.0

        with ToyDevice(delay=delay, seed=seed) as device:
            values(device.from_host(np.ones(1)) + 1)
        drawn.append(delays)
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 2


# -------------------------------------------------------------------- rows


def test_rows_run_as_one_kernel_or_as_several_or_as_one_of_its_own() -> None:
    def own(x: Any, approximate: str) -> Any:
        return np.full(x.shape, 7.0)

    gelu = ROWS["gelu"]
    x = np.array([-1.0, 0.5, 2.0])
    expected = gelu(x, approximate="tanh")
    with ToyDevice() as whole, ToyDevice("toy:1", composed=["gelu"]) as parts, ToyDevice("toy:2", kernels={"gelu": own}) as custom:
        assert values(gelu(whole.from_host(x), approximate="tanh")).tobytes() == expected.tobytes()
        assert list(whole.history) == ["from_host", "gelu"]
        assert values(gelu(parts.from_host(x), approximate="tanh")).tobytes() == expected.tobytes()
        assert "gelu" not in parts.history and "sigmoid" in parts.history and len(parts.history) > 4
        assert values(gelu(custom.from_host(x), approximate="tanh")).tolist() == [7.0] * 3


def test_a_kernel_of_its_own_is_what_a_tensor_gets() -> None:
    def own(x: Any, approximate: str) -> Any:
        return x * 0 + 7.0

    with ToyDevice(kernels={"gelu": own}):
        x = ag.tensor([1.0, 2.0], device="toy:0")
        assert ROWS["gelu"](x).numpy().tolist() == [7.0, 7.0]


def test_the_floating_point_error_state_of_the_caller_holds(toy: ToyDevice) -> None:
    a = toy.from_host(np.array([1.0, 0.0]))
    with np.errstate(divide="ignore"):
        b = 1.0 / a
    assert values(b).tolist() == [1.0, np.inf]
    with np.errstate(divide="raise"):
        c = 1.0 / a
    assert_raises(FloatingPointError, None, values, c)


# -------------------------------------------------------------------- faults


async def test_a_failed_kernel_fails_what_depends_on_it_and_nothing_else(toy: ToyDevice) -> None:
    a = toy.from_host(np.ones(2))
    toy.fail("sin")
    failed, fine = np.sin(a), np.cos(a)
    dependent = failed + 1
    await fine.__aiograd_wait__()
    assert toy.to_host(fine).tolist() == np.cos(np.ones(2)).tolist()
    await assert_awaiting_raises(ToyError, r"kernel sin on toy:0 \(number \d\)", failed.__aiograd_wait__())
    caught = await assert_awaiting_raises(DeviceError, r"toy:0.*kernel sin", dependent.__aiograd_wait__())
    assert isinstance(caught.__cause__, ToyError)
    await np.sin(a).__aiograd_wait__()  # once only
    assert not toy.is_dead


def test_faults_by_number_and_from_the_start() -> None:
    with ToyDevice(fail={2: "error", "cos": "memory"}) as toy:
        a = toy.from_host(np.ones(2))
        assert_raises(ToyError, "number 2", lambda: values(np.sin(a)))
        caught = assert_raises(ToyMemoryError, "kernel cos on toy:0", lambda: values(np.cos(a)))
        assert isinstance(caught, MemoryError)
        values(np.sin(a) + np.cos(a))
        toy.fail(2)
        b = a * 1
        assert_raises(ToyError, None, lambda: values(b * 2))


def test_a_failed_write_is_not_forgotten(toy: ToyDevice) -> None:
    a = toy.from_host(np.ones(2))
    view = a[:1]
    toy.fail("setitem")
    a[0] = 5.0
    for array in (a, view, a + 1):
        assert_raises(DeviceError, "setitem", values, array)


def test_a_dead_device_stays_dead(toy: ToyDevice) -> None:
    a = toy.from_host(np.ones(2))
    values(a)
    toy.fail("sin", "dead")
    b = np.sin(a)
    for read in (lambda: values(b), lambda: values(a), lambda: values(np.cos(a))):
        assert_raises(DeviceError, "kernel sin", read)
    assert toy.is_dead


def test_a_result_of_another_shape_than_promised_is_refused(toy: ToyDevice) -> None:
    toy.fail("sin", "shape")
    a = np.sin(toy.from_host(np.ones(3)))
    assert a.shape == (3,)
    assert_raises(DeviceError, r"sin on toy:0 returned \[3, 2\], float64; expected \[3\]", values, a)


def test_faults_that_make_no_sense_are_refused(toy: ToyDevice) -> None:
    assert_raises(ArgumentError, "'shape'", toy.fail, 1, "smoke")
    assert_raises(ArgumentError, "counted from 1", toy.fail, 0)


# -------------------------------------------------------------------- memory


def test_memory_is_counted_and_limited() -> None:
    with ToyDevice(memory=100) as toy:
        a = toy.from_host(np.ones(8))
        values(a)
        view = a[:4]
        values(view)
        assert (toy.statistics().allocations, toy.statistics().bytes) == (1, 64)
        with pytest.raises(ToyMemoryError, match="asked for 64 bytes, 36 of 100 are free"):
            values(a + 1)
        values(a[:2] * 2)
        del a
        assert toy.statistics().bytes == 64, "the view keeps the memory"
        del view
        gc.collect()
        assert (toy.statistics().allocations, toy.statistics().bytes) == (0, 0)
        values(toy.from_host(np.ones(12)))
        statistics = toy.statistics()
        assert (statistics.uploads, statistics.downloads) == (2, 4)


# -------------------------------------------------------------------- lifetime


def test_the_device_is_known_within_the_block_only() -> None:
    assert_raises(DeviceError, None, devices.device, "toy:0")
    with ToyDevice() as toy:
        assert devices.device("toy:0") is devices.device("toy") is toy and repr(toy) == "<ToyDevice toy:0>"
        assert isinstance(toy, devices.Device)
    assert_raises(DeviceError, None, devices.device, "toy:0")


def test_a_kind_alone_is_the_first_device_of_it_made_once() -> None:
    made: list[ToyDevice] = []

    def factory(ordinal: int) -> ToyDevice:
        made.append(ToyDevice(f"alone:{ordinal}"))
        return made[-1]

    devices.register_device_kind("alone", factory)
    try:
        assert devices.device("alone") is devices.device("alone:0") is devices.device("alone")
        assert len(made) == 1
    finally:
        devices._factories.pop("alone")
        devices.unregister_device("alone:0")
        made[0].close()


def test_closing_ends_the_thread_and_fails_what_is_queued() -> None:
    toy = ToyDevice("toy:7")
    a = toy.from_host(np.ones(2))
    values(a)
    toy.hold()
    pending = np.sin(a)
    assert any(thread.name == "aiograd-toy:7" for thread in threading.enumerate())
    toy.close()
    toy.close()
    assert not any(thread.name == "aiograd-toy:7" for thread in threading.enumerate())
    assert_raises(DeviceError, "closed before", values, pending)
    assert_raises(DeviceError, "closed", np.sin, a)


def test_a_simulated_device_has_no_thread_and_takes_virtual_time() -> None:
    loop = SimulatedLoop(seed=1)
    before = threading.active_count()

    async def main(toy: ToyDevice) -> float:
        a = toy.from_host(np.ones(2))
        b = np.sin(a)
        assert not b.__aiograd_is_ready__()
        assert_raises(NotReadyError, None, toy.to_host, b)
        await b.__aiograd_wait__()
        seen: list[Any] = []
        job = toy.submit(lambda: seen.append(asyncio._get_running_loop()))
        await asyncio.wrap_future(job)
        assert seen == [None], "as on a thread"
        toy.hold()
        c = np.cos(a)
        await asyncio.sleep(100.0)
        assert not c.__aiograd_is_ready__()
        toy.release()
        await c.__aiograd_wait__()
        return loop.time()

    with ToyDevice(loop=loop, delay=0.25) as toy:
        assert loop.run_until_complete(main(toy)) == 0.25 * 3 + 100.0 + 0.25
        assert threading.active_count() == before
        d = np.sin(toy.from_host(np.ones(1)))
        assert values(d).tolist() == [np.sin(1.0)], "outside of a loop the queue is worked off on the spot"
        toy.hold()
        assert_raises(DeviceError, "held", lambda: values(np.sin(d)))
    loop.close()
