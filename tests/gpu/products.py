"""Matrix products and convolutions beside PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import aiograd as ag
from tests.gpu.measuring import Run, share, table


def run(run: Run) -> Iterator[str]:
    """The tables, line by line."""
    yield from table("Matrix products", ("n", "dtype", "TFLOP/s", "of torch"), _products(run))
    yield from table("Convolutions, float32", ("shape", "TFLOP/s", "of torch"), _convolutions(run))


def _products(run: Run) -> Iterator[tuple[Any, ...]]:
    for dtype in ("float32", "float64", "float16"):
        for n in (512, 1024, 2048, 4096, 8192) if not run.tiny else (8,):
            host = (np.random.default_rng(0).standard_normal((n, n)) / n).astype(dtype)
            x = run.device.from_host(host)
            rate = 2 * n**3 / run.seconds(lambda x=x: x @ x)
            other = None
            if run.torch is not None:
                a = run.torch.tensor(host, device="cuda")
                other = 2 * n**3 / run.torch_seconds(lambda a=a: a @ a)
            yield f"{n}", dtype, f"{rate / 1e12:.2f}", share(rate, other)


def _convolutions(run: Run) -> Iterator[tuple[Any, ...]]:
    for batch, channels, size, filters in ((64, 64, 56, 64), (64, 128, 28, 128), (64, 256, 14, 256)) if not run.tiny else ((1, 2, 4, 2),):
        rng = np.random.default_rng(0)
        image, kernel = rng.standard_normal((batch, channels, size, size), np.float32), rng.standard_normal((filters, channels, 3, 3), np.float32)
        x, w = ag.tensor(image, device="cuda:0"), ag.tensor(kernel, device="cuda:0")
        flops = 2 * batch * filters * size**2 * channels * 9
        rate = flops / run.seconds(lambda x=x, w=w: ag.nn.functional.conv2d(x, w, padding=1)._data)
        other = None
        if run.torch is not None:
            a, b = run.torch.tensor(image, device="cuda"), run.torch.tensor(kernel, device="cuda")
            other = flops / run.torch_seconds(lambda a=a, b=b: run.torch.nn.functional.conv2d(a, b, padding=1))
        yield f"{batch}×{channels}×{size}×{size}, {filters} of 3×3", f"{rate / 1e12:.2f}", share(rate, other)
