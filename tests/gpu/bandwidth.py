"""Kernels that are bound by memory: element-wise, reductions, normalisations, the optimizer; copies to and from the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.ops.op import ROWS
from tests.gpu.measuring import Run, share, table


def copy_bandwidth(run: Run) -> float:
    """Bytes a second, read and written, of copies within the device."""
    nbytes = run.of(1 << 30, 1 << 12)
    driver = run.device.driver
    source, target = run.device.submit(lambda: (driver.allocate(nbytes, None), driver.allocate(nbytes, None))).result()

    def copy() -> None:
        run.device.submit(lambda: driver.copy(target, 0, source, 0, nbytes, None))

    found = 2 * nbytes / run.seconds(copy)
    run.device.submit(lambda: (driver.free(source, None), driver.free(target, None))).result()
    return found


def run(run: Run) -> Iterator[str]:
    """The tables, line by line."""
    yield from table("Bound by memory", ("kernel", "dtype", "GB/s", "of copy", "of torch"), _kernels(run))
    yield from table("Host and device", ("copy", "GB/s"), _host(run))


def _kernels(run: Run) -> Iterator[tuple[Any, ...]]:
    copied = copy_bandwidth(run)
    yield "copy", "", f"{copied / 1e9:.0f}", "100 %", ""
    for dtype in ("float32", "float16"):
        side = run.of(8192, 8)
        host = np.random.default_rng(0).standard_normal((side, side), np.float32).astype(dtype)
        x, y = run.device.from_host(host), run.device.from_host(host[::-1])
        for name, moved, call, theirs in _cases(x, y, run, host):
            rate = moved * host.nbytes / run.seconds(call)
            other = moved * host.nbytes / run.torch_seconds(theirs) if theirs else None
            yield name, dtype, f"{rate / 1e9:.0f}", share(rate, copied), share(rate, other)
    yield _optimizer(run, copied)


def _cases(x: Any, y: Any, run: Run, host: Any) -> list[tuple[str, float, Callable[[], Any], Callable[[], Any] | None]]:
    """Name, arrays moved, ours, theirs."""
    ones = np.ones(host.shape[-1], host.dtype)
    gain, shift = run.device.from_host(ones), run.device.from_host(0 * ones)
    ours: dict[str, tuple[float, Callable[[], Any]]] = {
        "x + y": (3, lambda: x + y),
        "exp(x) · y + x, one kernel": (3, lambda: np.exp(x) * y + x),
        "sum of all": (1, lambda: np.sum(x)),
        "sum along rows": (1, lambda: np.sum(x, axis=1)),
        "sum along columns": (1, lambda: np.sum(x, axis=0)),
        "transposed copy": (2, lambda: x.T.copy()),
        "softmax": (2, lambda: ROWS["softmax"](x, axis=-1)),
        "layer norm": (2, lambda: ROWS["layer_norm"](x, gain, shift, ndims=1, eps=1e-5)),
    }
    theirs: dict[str, Callable[[], Any]] = {}
    torch = run.torch
    if torch is not None:
        a = torch.tensor(host, device="cuda")
        b = torch.tensor(host[::-1].copy(), device="cuda")
        weight, bias = torch.tensor(ones, device="cuda"), torch.tensor(0 * ones, device="cuda")
        theirs = {
            "x + y": lambda: a + b,
            "exp(x) · y + x, one kernel": lambda: torch.exp(a) * b + a,
            "sum of all": lambda: a.sum(),
            "sum along rows": lambda: a.sum(1),
            "sum along columns": lambda: a.sum(0),
            "transposed copy": lambda: a.T.contiguous(),
            "softmax": lambda: torch.softmax(a, -1),
            "layer norm": lambda: torch.nn.functional.layer_norm(a, a.shape[-1:], weight, bias),
        }
    return [(name, moved, call, theirs.get(name)) for name, (moved, call) in ours.items()]


def _optimizer(run: Run, copied: float) -> tuple[Any, ...]:
    """AdamW over the parameters of a transformer: five arrays read, three written, each of the parameters' size."""
    shapes = [(run.of(2048, 4), run.of(2048, 4))] * run.of(24, 2) + [(run.of(2048, 4),)] * run.of(48, 2)
    nbytes = sum(int(np.prod(shape)) for shape in shapes) * 4
    parameters = [ag.tensor(np.ones(shape, np.float32), device="cuda:0", requires_grad=True) for shape in shapes]
    for parameter in parameters:
        parameter.grad = ag.tensor(np.full(parameter.shape, 0.1, np.float32), device="cuda:0")
    optimizer = ag.optim.AdamW(parameters)

    def step() -> None:
        optimizer.step()
        for parameter in parameters:
            parameter._data.flush()

    other = None
    if run.torch is not None:
        theirs = [run.torch.ones(shape, device="cuda", requires_grad=True) for shape in shapes]
        for parameter in theirs:
            parameter.grad = run.torch.full_like(parameter, 0.1)
        fused = run.torch.optim.AdamW(theirs, fused=True)
        other = 7 * nbytes / run.torch_seconds(fused.step)
    rate = 7 * nbytes / run.seconds(step)
    return "AdamW step", "float32", f"{rate / 1e9:.0f}", share(rate, copied), share(rate, other)


def _host(run: Run) -> Iterator[tuple[str, str]]:
    """Copies to and from the host, alone and under a running product."""
    for name, nbytes in (("64 kB", 1 << 16), ("4 MB", 4 << 20), ("64 MB", 64 << 20), ("256 MB", 256 << 20)):
        nbytes = run.of(nbytes, 1 << 10)
        host = np.ones(nbytes, np.uint8)
        array = run.device.from_host(host)
        up = run.seconds(lambda host=host: run.device.from_host(host))
        down = run.seconds(lambda array=array: run.device.to_host(array) is None)
        yield f"{name} to the device", f"{nbytes / up / 1e9:.1f}"
        yield f"{name} to the host", f"{nbytes / down / 1e9:.1f}"
    if not run.tiny:
        yield "product while copying 256 MB, of the product alone", asyncio.run(_overlap(run, host))


async def _overlap(run: Run, host: Any) -> str:
    x = run.device.from_host(np.ones((8192, 8192), np.float32))
    alone = run.seconds(lambda: x @ x)
    side = ag.cuda.Stream()

    def both() -> Any:
        with side:
            run.device.from_host(host)
        return x @ x

    return f"{run.seconds(both) / alone:.2f} ×"
