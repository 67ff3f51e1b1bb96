"""Every row on arrays without elements and without axes: a value and a gradient of the right shapes, or one typed error at the call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import AiogradError, ArgumentTypeError, IndexRangeError, ShapeError
from aiograd.ops import ROWS
from tests.ops import domains_core, domains_nn
from tests.support import assert_raises

DOMAINS = {**domains_core.DOMAINS, **domains_nn.DOMAINS}
#: rows that rules call, with static arguments that say what the shapes are
CALLED_BY_RULES = {name for name in DOMAINS if name.endswith(("_grad", "_adjoint"))} | {"prod_others"}


def _shrunk(value: Any, extent: int | None) -> Any:
    """Without the axes (None), or with no elements along all axes of an extent."""
    if not isinstance(value, np.ndarray):
        return value
    if extent is None:
        return value.reshape(-1)[0] * np.ones((), value.dtype) if value.size else np.zeros((), value.dtype)
    return value[tuple(slice(0 if n == extent else None) for n in value.shape)]


def edges(name: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The drawn arguments of a row with extents taken away."""
    domain = DOMAINS[name]
    for variety in range(domain.varieties):
        args, kwargs = domain.draw(np.random.default_rng([variety, 7]), variety)
        if domain.prepare is not None:
            args = domain.prepare(*args)
        args = tuple(np.asarray(a) if isinstance(a, np.generic) else a for a in args)
        extents = sorted({n for a in args if isinstance(a, np.ndarray) for n in a.shape})
        for extent in (None, *extents):
            yield tuple(np.asarray(_shrunk(a, extent)) if isinstance(a, np.ndarray) else a for a in args), kwargs


@pytest.mark.parametrize("name", sorted(DOMAINS.keys() - CALLED_BY_RULES))
async def test_rows_give_values_and_gradients_or_a_typed_error_at_the_call(name: str) -> None:
    row = ROWS[name]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's of variances of nothing
        warnings.filterwarnings("ignore", "Out of bound index found", DeprecationWarning)  # of numpy 2.1, where newer ones raise
        for args, kwargs in edges(name):
            tensors = [ag.tensor(a, requires_grad=a.dtype.kind in "fc") if isinstance(a, np.ndarray) else a for a in args]
            leaves = [t for t in tensors if isinstance(t, ag.Tensor) and t.requires_grad]
            what = f"{name} of {[getattr(a, 'shape', a) for a in args]}, {kwargs}"
            try:
                found = row(*tensors, **kwargs)
            except (AiogradError, np.linalg.LinAlgError):
                continue
            except Exception as error:
                raise AssertionError(f"{what}: an untyped error at the call") from error
            outputs = [out for out in (found if isinstance(found, tuple) else (found,)) if out.requires_grad]
            for create_graph in (False, True):
                if not outputs:
                    continue
                seeds = [ag.ones_like(out) for out in outputs]
                try:
                    gradients = await ag.grad(outputs, leaves, seeds, retain_graph=True, create_graph=create_graph, allow_unused=True)
                except Exception as error:
                    raise AssertionError(f"{what}: an error in backward, {create_graph=}") from error
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    assert gradient is None or gradient.shape == leaf.shape, what


Z = np.zeros
#: what to call -> ours and the expected value, of arrays of these shapes (zeros)
VALUES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], Any]] = {
    "products of stacks": (lambda a, b: a @ b, ((5, 5, 0), (0, 5)), Z((5, 5, 5))),
    "product with an empty stack": (lambda a, b: a @ b, ((3, 2), (0, 2, 5)), Z((0, 3, 5))),
    "inner": (ag.inner, ((2, 0), (3, 0)), Z((2, 3))),
    "inner of vectors": (ag.inner, ((0,), (0,)), Z(())),
    "dot": (ag.dot, ((2, 0), (4, 0, 3)), Z((2, 4, 3))),
    "softmax along nothing": (lambda a: ag.softmax(a, axis=-1), ((3, 0),), Z((3, 0))),
    "log_softmax along nothing": (lambda a: ag.log_softmax(a, axis=0), ((0,),), Z((0,))),
    "softmax of a number": (lambda a: ag.softmax(a, axis=-1), ((),), 1.0),
    "softmax of a number, first axis": (lambda a: ag.softmax(a, axis=0), ((),), 1.0),
    "log_softmax of a number": (lambda a: ag.log_softmax(a, axis=-1), ((),), 0.0),
    "attention of no queries": (lambda q, k: ag.nn.functional.scaled_dot_product_attention(q, k, k), ((2, 0, 4), (2, 3, 4)), Z((2, 0, 4))),
    "median of nothing": (ag.median, ((0,),), np.nan),
    "medians of nothing": (lambda a: ag.median(a, axis=0), ((0, 2),), np.full(2, np.nan)),
    "mean of nothing": (ag.mean, ((2, 0),), np.nan),
    "logsumexp of nothing": (lambda a: ag.logsumexp(a, axis=1), ((3, 0),), np.full(3, -np.inf)),
    "prod of a number": (lambda a: a.prod(0), ((),), 0.0),
    "prod of a number, last axis": (lambda a: ag.prod(a, axis=-1), ((),), 0.0),
    "mean of a number": (lambda a: ag.mean(a, axis=0), ((),), 0.0),
    "prod of nothing": (lambda a: ag.prod(a, axis=1), ((2, 0),), np.ones(2)),
    "take of a number": (lambda a: ag.take(a, [0, 0], axis=0), ((),), Z(2)),
    "numpy's take of a number": (lambda a: np.take(a, [0], axis=-1), ((),), Z(1)),
    "repeat of a number": (lambda a: ag.repeat(a, 3, axis=0), ((),), Z(3)),
    "cumsum of a number": (lambda a: a.cumsum(axis=0), ((),), Z(1)),
    "cumprod of a number": (lambda a: ag.cumprod(a, -1), ((),), Z(1)),
    "flatten": (lambda a: a.flatten(1), ((0, 3, 2),), Z((0, 6))),
    "layer_norm over nothing": (lambda a: ag.nn.functional.layer_norm(a, (0,)), ((3, 0),), Z((3, 0))),
    "rms_norm over nothing": (lambda a: ag.nn.functional.rms_norm(a, (0,)), ((3, 0),), Z((3, 0))),
    "diff of one": (ag.diff, ((3, 1),), Z((3, 0))),
    "diff of order 0": (lambda a: ag.diff(a, n=0, append=Z((3, 1))), ((3, 2),), Z((3, 2))),
    "rank": (ag.linalg.matrix_rank, ((2, 0, 3),), Z(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
async def test_values_of_nothing_and_of_numbers(name: str) -> None:
    function, shapes, wanted = VALUES[name]
    leaves = [ag.tensor(np.zeros(shape), requires_grad=True) for shape in shapes]
    found = function(*leaves)
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.detach().numpy(), wanted)
    if found.requires_grad:
        for create_graph in (False, True):
            gradients = await ag.grad(found, leaves, ag.ones_like(found), retain_graph=True, create_graph=create_graph)
            assert [g.shape for g in gradients] == list(shapes)


async def test_gradients_of_numbers_taken_for_vectors() -> None:
    x = ag.tensor(np.array(3.0), requires_grad=True)
    results = (
        ag.take(x, [0, 0], axis=0), ag.repeat(x, 2, axis=0), ag.cumsum(x, 0) * 2, ag.prod(x, axis=0) * 2, ag.log_softmax(x) + 2 * x, ag.median(x) * 2,
    )  # fmt: skip
    for result in results:
        (gradient,) = await ag.grad(result, [x], ag.ones_like(result))
        assert gradient.shape == () and gradient.item() == 2.0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ag.linalg.matrix_power(np.eye(2), 1.5), ArgumentTypeError),  # type: ignore[arg-type]
        (lambda: ag.softmax(Z(3), axis=1), IndexRangeError),
        (lambda: ag.softmax(Z((3, 0)), axis=2), IndexRangeError),
        (lambda: ag.softmax(Z(()), axis=1), IndexRangeError),
        (lambda: ag.diff(Z(())), IndexRangeError),
        (lambda: ag.diff(Z((2, 3)), axis=2), IndexRangeError),
        (lambda: ag.moveaxis(Z((2, 3)), 2, 0), IndexRangeError),
        (lambda: ag.moveaxis(Z(()), 0, 0), IndexRangeError),
        (lambda: ag.unstack(Z(())), IndexRangeError),
        (lambda: ag.tensordot(Z((2, 2)), Z((2, 2)), axes=((2,), (0,))), IndexRangeError),
        (lambda: ag.pad(Z((0, 3)), 1, mode="reflect"), ShapeError),
        (lambda: ag.pad(Z(3), -1), AiogradError),
        (lambda: ag.nn.functional.scaled_dot_product_attention(Z((2, 3, 0)), Z((2, 3, 0)), Z((2, 3, 4))), ShapeError),
    ],
)
def test_what_has_no_value_is_a_typed_error_at_the_call(call: Callable[[], Any], error: type[Exception]) -> None:
    assert_raises(error, None, call)


def test_rows_have_the_parameters_that_inspect_finds() -> None:
    checked = 0
    for op in ROWS.values():
        if not isinstance(op.forward, np.ufunc):
            parameters = inspect.signature(op.forward).parameters.values()
            kinds = {kind: tuple(p.name for p in parameters if p.kind is kind) for kind in {p.kind for p in parameters}}
            assert op.arrays == kinds.get(inspect.Parameter.POSITIONAL_ONLY, ()), op
            assert (() if op.variadic is None else (op.variadic,)) == kinds.get(inspect.Parameter.VAR_POSITIONAL, ()), op
            assert op.defaults == {p.name: p.default for p in parameters if p.default is not p.empty}, op
            assert {*op.statics} == {p.name for p in parameters} - {*op.arrays, op.variadic}, op
        for _, rule, names in op.rule_plan(op.rules, op.joint):
            assert names == (*inspect.signature(rule).parameters,)[1:], op
            checked += 1
    assert checked > 200


@pytest.mark.parametrize("order", [1, 1.5, 3])
async def test_second_derivatives_of_a_complex_norm_at_zero_elements(order: float) -> None:
    x = ag.tensor(np.array([0j, 3 + 4j]), requires_grad=True)
    (slope,) = await ag.grad(ag.linalg.vector_norm(x, ord=order), x, create_graph=True)
    (bend,) = await ag.grad(ag.real(slope).sum() + ag.imag(slope).sum(), x)
    assert bend.numpy()[0] == 0 and np.allclose(bend.numpy()[1], 0.032 - 0.024j)


@pytest.mark.parametrize("ord", [-1, -2, -0.5])
async def test_an_element_of_0_makes_a_norm_of_negative_order_0(ord: float) -> None:
    x = ag.tensor([[0.0, 1.0, 2.0], [1.0, 2.0, 4.0]], requires_grad=True)
    with np.errstate(divide="ignore"):  # as numpy
        norms = ag.linalg.vector_norm(x, ord=ord, axis=1)
    (slopes,) = await ag.grad(norms.sum(), [x])
    expected = np.abs(x.detach().numpy()[1] / norms[1].item()) ** (ord - 1)
    np.testing.assert_allclose(slopes.numpy(), [[0.0, 0.0, 0.0], expected], rtol=1e-5)
