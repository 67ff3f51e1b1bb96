"""Every differentiable row through a compiled function: values and gradients have the bits of the eager call, also for other values than recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.ops import ROWS
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE, DOMAINS, drawn, floating
from tests.support import bits
from tests.sweeps import swept

CASES = (8, 200)


def other(array: Any, by: float) -> Any:
    """A little off, within the row's domain."""
    return (array * array.dtype.type(1 + by)) if floating(array) else array


def functions_of(name: str, dtype: Any, cases: tuple[int, int], *, imaginary: bool = False) -> Iterator[tuple[Any, list[Any], str]]:
    """A row as functions of its floating arguments that return its floating outputs; each with values for them, and a text."""
    domain, row = DOMAINS[name], ROWS[name]
    for args, kwargs in drawn(domain, *cases, imaginary):
        args = tuple(np.asarray(a).astype(dtype) if floating(a) else a for a in args)
        keys = [i for i, a in enumerate(args) if floating(a)]

        def function(*tensors: Any, args: Any = args, kwargs: Any = kwargs, keys: Any = keys) -> Any:
            full = list(args)
            for i, tensor in zip(keys, tensors, strict=True):
                full[i] = tensor
            out = domain.call(row, full, kwargs)
            outputs = out if isinstance(out, tuple) else (out,)
            return tuple(output * 1 for output in outputs if output.dtype.kind in "fc")

        yield function, [args[i] for i in keys], f"{name}{[np.shape(args[i]) for i in keys]} {kwargs}"


async def check(name: str, dtype: Any, imaginary: bool = False) -> None:
    ran = 0
    for function, arguments, text in functions_of(name, dtype, CASES, imaginary=imaginary):
        compiled = ag.compile(function)
        for by in (0.0, 1e-4, -1e-4, 2e-4):
            values = [other(argument, by) for argument in arguments]
            found = []
            for call in (function, compiled):
                tensors = [ag.tensor(value, requires_grad=True) for value in values]
                outputs = call(*tensors)
                given = [ag.asarray(np.cos(np.arange(output.size)).reshape(output.shape).astype(output.dtype)) for output in outputs]
                wanted = [(output, grad) for output, grad in zip(outputs, given, strict=True) if output.requires_grad]
                grads = await ag.grad([o for o, _ in wanted], tensors, [g for _, g in wanted], allow_unused=True) if wanted else ()
                found.append((bits(*outputs), bits(*grads)))
            assert found[0] == found[1], f"{text} at {by}"
        statistics = compiled.statistics()
        assert not statistics.breaks and statistics.recordings == 1, statistics
        ran += statistics.runs
    assert ran


@pytest.mark.parametrize("name", swept(DIFFERENTIABLE, keep=60))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_row(name: str, dtype: Any) -> None:
    ag.run(check(name, dtype), tune_gc=False)


@pytest.mark.parametrize("name", swept((name for name in DIFFERENTIABLE if DOMAINS[name].complex), keep=20))
def test_row_on_complex_numbers(name: str) -> None:
    ag.run(check(name, np.complex128, imaginary=True), tune_gc=False)
