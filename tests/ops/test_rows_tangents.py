"""Every differentiable row in forward mode: the tangent that it declares against its transposed rule, and against differences.

Arguments are those of the tests of gradients. The transposed rule is the row's own rule, run backward on recording arrays: another formula.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.ops import ROWS
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE, DOMAINS, drawn, floating
from tests.sweeps import swept

#: cases per row, and how many elements they may have
CASES = (6, 200)
#: rows without a tangent of their own: decompositions whose tangents are as long as their gradients, and recurrences over many steps
TRANSPOSED = {"eig", "gru", "gru_cell", "lstm", "lstm_cell", "pinv", "qr", "rnn", "svd"}


def test_few_rows_are_transposed() -> None:
    assert {name for name in DIFFERENTIABLE if ROWS[name].jvp is None} == TRANSPOSED
    assert len(TRANSPOSED) <= 15


def split(output: Any) -> list[Any]:
    """Floating outputs as real Tensors."""
    outputs = output if isinstance(output, tuple) else (output,)
    return [part for o in outputs if o.dtype.kind in "fc" for part in ([np.real(o), np.imag(o)] if o.dtype.kind == "c" else [o])]


def problems(name: str, dtype: Any, imaginary: bool) -> list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
    """Functions of real Tensors that run the row, with inputs and tangents."""
    domain, row = DOMAINS[name], ROWS[name]
    found = []
    for args, kwargs in drawn(domain, *CASES, imaginary):
        rng = np.random.default_rng(3)
        keys = [i for i, a in enumerate(args) if floating(a)]
        parts = [np.asarray(p, dtype) for i in keys for p in ((args[i].real, args[i].imag) if imaginary else (args[i],))]

        def function(*tensors: Any, args: Any = args, kwargs: Any = kwargs, keys: Any = keys) -> Any:
            full = list(args)
            for k, i in enumerate(keys):
                full[i] = ROWS["complex"](tensors[2 * k], tensors[2 * k + 1]) if imaginary else tensors[k]
            return tuple(split(domain.call(row, full, kwargs)))

        directions = [np.asarray(rng.normal(size=p.shape), dtype) for p in parts]
        found.append((function, tuple(map(ag.tensor, parts)), tuple(map(ag.tensor, directions))))
    return found


async def products(function: Any, inputs: Any, directions: Any, row: Any = None) -> list[Any]:
    """The tangents of the outputs; transposed for a row."""
    declared = None if row is None else row.jvp
    if row is not None:
        row.jvp = None
    try:
        outputs, found = await ag.jvp(function, inputs, directions)
    finally:
        if row is not None:
            row.jvp = declared
    for output, product, plain in zip(outputs, found, function(*inputs), strict=True):
        assert product.shape == output.shape and product.dtype == output.dtype
        np.testing.assert_array_equal(output.numpy(), plain.numpy())  # the bits of the plain forward
    return [product.numpy() for product in found]


def differences(function: Any, inputs: Any, directions: Any) -> list[Any]:
    """Central differences along the directions, of fourth order."""
    step = 1e-4
    ends = [[o.numpy() for o in function(*(x + step * k * v for x, v in zip(inputs, directions, strict=True)))] for k in (-2, -1, 1, 2)]
    return [(a - 8 * b + 8 * c - d) / (12 * step) for a, b, c, d in zip(*ends, strict=True)]


def compare(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        scale = np.max(np.abs(b[np.isfinite(b)]), initial=1.0)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


async def check(name: str, imaginary: bool = False) -> None:
    row = ROWS[name]
    for function, inputs, directions in problems(name, np.float64, imaginary):
        found = await products(function, inputs, directions)
        if row.jvp is not None:
            compare(found, await products(function, inputs, directions, row), 1e-9)
        near = differences(function, inputs, directions)
        compare(found, near, 1e-5)
    if not imaginary and "float32" in DOMAINS[name].dtypes:
        for function, inputs, directions in problems(name, np.float32, False):
            found = await products(function, inputs, directions)
            wide = tuple(tuple(t.astype(np.float64) for t in tensors) for tensors in (inputs, directions))
            compare(found, await products(function, *wide, row), 2e-3)


@pytest.mark.parametrize("name", swept([name for name in DIFFERENTIABLE if name != "complex"], keep=40))
def test_row(name: str) -> None:
    ag.run(check(name), tune_gc=False)


@pytest.mark.parametrize("name", swept((name for name in DIFFERENTIABLE if name in DOMAINS and DOMAINS[name].complex), keep=8))
def test_row_on_complex_numbers(name: str) -> None:
    ag.run(check(name, imaginary=True), tune_gc=False)
