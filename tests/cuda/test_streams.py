"""Streams and events: what goes where, what waits for what, and that nothing changes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.stream import Event, Stream, current_stream
from aiograd.cuda.stream_state import StreamState
from aiograd.errors import ArgumentError, ModeError, NotReadyError
from tests.support import assert_raises
from tests.tolerance import tolerance

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


class Recorder:
    """Writes down what a driver is asked, and on which stream."""

    def __init__(self, device: CudaDevice) -> None:
        self.calls: list[tuple[str, Any]] = []
        driver = device.driver
        launch, wait_for = driver.launch, driver.wait_for

        def recorded_launch(kernel: Any, grid: Any, block: Any, args: Any, stream: Any) -> None:
            self.calls.append((kernel.__name__, stream))
            launch(kernel, grid, block, args, stream)

        def recorded_wait_for(stream: Any, event: Any) -> None:
            self.calls.append(("wait", stream))
            wait_for(stream, event)

        driver.launch, driver.wait_for = recorded_launch, recorded_wait_for  # type: ignore[method-assign]


class LateEvents:
    """Lets no event come to pass until it is told so."""

    def __init__(self, device: CudaDevice) -> None:
        self.done = False
        device.driver.is_done = lambda event: self.done  # type: ignore[method-assign]


async def test_what_another_stream_made_is_waited_for_once(device: CudaDevice) -> None:
    late, recorder, side = LateEvents(device), Recorder(device), Stream()
    x = ag.tensor(X, device="cuda:0")
    with side:
        y = ag.exp(x)
        z = ag.tanh(y)
        y._data.flush()
        z._data.flush()
    w = z + 1
    w._data.flush()
    device.submit(lambda: None).result()
    names = [name for name, _ in recorder.calls]
    # the side stream waits for the upload, the first one for the side stream; neither waits twice
    assert names == ["wait", "exp", "tanh", "wait", "add"], recorder.calls
    assert [stream is side.stream_state.handle for _, stream in recorder.calls] == [True, True, True, False, False]
    late.done = True
    np.testing.assert_allclose((await w).numpy(), np.tanh(np.exp(X)) + 1, rtol=tolerance(np.float32))


async def test_a_write_waits_for_readers_on_other_streams(device: CudaDevice) -> None:
    late, recorder, side = LateEvents(device), Recorder(device), Stream()
    x = device.from_host(X)
    with side:
        y = np.exp(x)
        y.flush()
    x[...] = 0.0
    device.submit(lambda: None).result()
    assert [(name, stream is side.stream_state.handle) for name, stream in recorder.calls][-2:] == [("wait", False), ("cast", False)]
    late.done = True
    await y.__aiograd_wait__()
    np.testing.assert_allclose(device.to_host(y), np.exp(X), rtol=tolerance(np.float32))


async def test_memory_is_freed_behind_its_users_on_other_streams(device: CudaDevice) -> None:
    late, recorder, side = LateEvents(device), Recorder(device), Stream()
    x = device.from_host(X)
    with side:
        y = np.exp(x)
        y.flush()
    del x
    device.submit(lambda: None).result()
    assert recorder.calls[-1] == ("wait", None)
    late.done = True


async def test_backward_work_goes_where_forward_work_went(device: CudaDevice) -> None:
    recorder, side = Recorder(device), Stream()
    x = ag.tensor(X, device="cuda:0", requires_grad=True)
    with side:
        y = ag.exp(x)
    loss = (y * y).sum()
    recorder.calls.clear()
    await loss.backward()
    await x.grad
    streams = [stream is side.stream_state.handle for name, stream in recorder.calls if name != "wait"]
    assert True in streams
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.exp(2 * X), rtol=1e-5)


async def test_streams_change_no_bits(device: CudaDevice) -> None:
    async def run(streams: list[Stream]) -> bytes:
        x = ag.tensor(X, device="cuda:0", requires_grad=True)
        parts = []
        for i in range(4):
            with streams[i % len(streams)]:
                parts.append(ag.tanh(x * float(i)) @ x.T)
        await sum(parts[1:], parts[0]).sum().backward()
        return (await x.grad).numpy().tobytes()  # type: ignore[no-any-return]

    assert await run([current_stream()]) == await run([Stream(), Stream(), Stream()])


async def test_events(device: CudaDevice) -> None:
    late = LateEvents(device)
    side = Stream()
    with side:
        y = ag.exp(ag.tensor(X, device="cuda:0"))
        y._data.flush()
    event = side.record_event()
    device.submit(lambda: None).result()
    assert not event.query()
    assert_raises(NotReadyError, "await event", event.synchronize)
    late.done = True
    await event
    assert event.query()
    await side.done()
    assert Event().query()
    assert_raises(ArgumentError, "timing=True", lambda: event.elapsed_ms(side.record_event()))
    start, end = side.record_event(timing=True), side.record_event(timing=True)
    await end
    assert start.elapsed_ms(end) == 0.0


def test_outside_of_a_loop_synchronize_waits(device: CudaDevice) -> None:
    side = Stream()
    with side:
        ag.exp(ag.tensor(X, device="cuda:0"))
    side.synchronize()
    assert side.query()


async def test_a_stream_is_the_task_s_own(device: CudaDevice) -> None:
    side = Stream()
    seen: list[StreamState] = []

    async def other() -> None:
        seen.append(device.current_stream_state())

    with side:
        task = asyncio.create_task(other())
        assert current_stream() == side
    await other()
    await task
    assert seen == [device.default_stream_state, side.stream_state]


async def test_leaving_a_stream_in_another_context_is_refused(device: CudaDevice) -> None:
    side = Stream()

    async def enter() -> None:
        side.__enter__()

    await asyncio.create_task(enter())
    assert_raises(ModeError, "another task", side.__exit__, None, None, None)


async def test_streams_wait_for_each_other_where_asked(device: CudaDevice) -> None:
    late, recorder = LateEvents(device), Recorder(device)
    first, second = Stream(), Stream()
    with first:
        ag.exp(ag.tensor(X, device="cuda:0"))._data.flush()
    second.wait_stream(first)
    device.submit(lambda: None).result()
    assert recorder.calls[-1] == ("wait", second.stream_state.handle)
    late.done = True


def test_a_stream_needs_a_cuda_device() -> None:
    assert_raises(ArgumentError, "CUDA device", Stream, "cpu")
