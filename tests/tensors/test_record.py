"""The fast ways in of the recorder: what they share with `call`, and that a forward runs once."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentTypeError
from aiograd.ops import ROWS, Op
from aiograd.tensors.attach import has_rule
from aiograd.tensors.record import call
from aiograd.tensors.unrolled import binary, unary

DTYPES = (np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128)
FAST = [
    op
    for op in ROWS.values()
    if not op.statics and op.variadic is None and op.outputs == 1 and not op.view and len(op.arrays) in (1, 2)
    and op.name != "eigvals"  # complex of real arguments: its function calls the row the general way
]  # fmt: skip


def counted(op: Op) -> tuple[Op, list[int]]:
    """The same row with a forward that counts its calls."""
    calls: list[int] = []

    def one(x: Any, /) -> Any:
        calls.append(1)
        return op.forward(x)

    def two(x1: Any, x2: Any, /) -> Any:
        calls.append(1)
        return op.forward(x1, x2)

    forward = one if len(op.arrays) == 1 else two
    rules = {new: op.rules[old] for new, old in zip(("x",) if len(op.arrays) == 1 else ("x1", "x2"), op.arrays, strict=True) if old in op.rules}
    copied = Op(
        op.name, forward, rules, op.joint, outputs=1, differentiable_outputs=None, view=False, complex=op.complex, cost=op.cost, fused=None
    )
    return copied, calls


@pytest.mark.parametrize("op", [op for op in FAST if set(op.arrays) <= {"x", "x1", "x2"}], ids=lambda op: op.name)
def test_a_forward_runs_once_whatever_the_dtype(op: Op) -> None:
    row, calls = counted(op)
    apply = unary(row) if len(op.arrays) == 1 else binary(row)
    ran = 0
    for dtype in DTYPES:
        for needs in (False, True) if np.dtype(dtype).kind in "fc" else (False,):
            arrays = [np.array([[0.5, 0.25], [0.25, 0.75]]).astype(dtype) for _ in op.arrays]
            with np.errstate(all="ignore"):
                try:
                    op.forward(*arrays)
                except (TypeError, KeyError, np.linalg.LinAlgError):  # a row of other numbers
                    continue
                arguments = [ag.tensor(array, requires_grad=needs and has_rule(row, name)) for name, array in zip(row.arrays, arrays, strict=True)]
                calls.clear()
                try:
                    made = apply(*arguments)
                except ArgumentTypeError:  # a rule for real numbers only
                    assert len(calls) == 1 and needs and np.dtype(dtype).kind == "c"
                    continue
                assert len(calls) == 1, (dtype, needs)
                reference = call(row, tuple(arguments), {})
            ran += 1
            assert made.dtype == reference.dtype and made.requires_grad == reference.requires_grad
            assert type(made.grad_fn) is type(reference.grad_fn)
            np.testing.assert_array_equal(made.detach().numpy(), reference.detach().numpy())
    assert ran


#: rows that `unary` and `binary` may serve: `complex` makes complex numbers of real ones
REAL = [op for op in FAST if all(name in op.rules for name in op.arrays) and op.name != "complex"]


@pytest.mark.parametrize("op", REAL, ids=lambda op: op.name)
def test_a_result_of_real_arguments_is_real(op: Op) -> None:
    for dtypes in product((np.float32, np.float64), (np.float32, np.float64, np.int64, np.bool_)):
        arrays = [np.array([[0.5, 0.25], [0.25, 0.75]]).astype(dtype) for dtype in dtypes[: len(op.arrays)]]
        with np.errstate(all="ignore"):
            try:
                found = np.asarray(op.forward(*arrays)).dtype
            except (TypeError, KeyError, np.linalg.LinAlgError):  # a row of other numbers
                continue
        assert found in (np.float32, np.float64), dtypes


async def test_a_result_of_other_dtypes_is_differentiated() -> None:
    for dtype in (np.float16, np.longdouble, np.complex64):
        x = ag.tensor(np.array([0.5, 2.0], dtype), requires_grad=True)
        await (x * x + np.exp(x) - np.exp(x)).sum().backward(ag.tensor(np.ones((), dtype)))
        assert x.grad.dtype == dtype
        np.testing.assert_allclose(x.grad.numpy(), np.array([1.0, 4.0], dtype), rtol=1e-2)


def test_a_row_without_a_rule_gives_no_node() -> None:
    x = ag.tensor([5.0, 7.0], requires_grad=True)
    for result in (x // 2, 7 // x, x > 0, ag.floor_divide(x, 2)):
        assert not result.requires_grad and result.grad_fn is None
