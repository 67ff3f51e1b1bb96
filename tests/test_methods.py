"""Methods of Tensor: each is the function of its name, with numpy's and PyTorch's ways of giving arguments."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, ShapeError
from aiograd.tensors.core import TensorCore
from tests.method_stub import METHODS, PATH, stub
from tests.support import assert_raises

#: what a numpy or PyTorch script that is ported meets first
EVERYDAY = (
    "copy ravel round dot sort argsort cumprod cumsum diagonal trace take repeat nonzero conj clip prod std var argmax argmin all any swapaxes "
    "squeeze add mul sub div pow exp log sqrt abs neg sigmoid tanh relu softmax log_softmax masked_fill where gather scatter scatter_add "
    "index_select index_add flip roll unflatten flatten expand permute transpose unsqueeze view reshape narrow chunk split unbind sum mean max "
    "min amax amin median logsumexp norm matmul mm bmm outer topk tril triu tile maximum minimum eq ne lt le gt ge isnan isinf isfinite clamp "
    "contiguous numel dim clone expand_as view_as float double half long int bool real imag T mT to cpu astype item tolist numpy detach add_ "
    "sub_ mul_ div_ copy_ fill_ zero_"
).split()

A = np.array([[4.0, 1.0, 3.0], [2.0, 6.0, 5.0]])
C = np.arange(24.0).reshape(2, 3, 4)
S = np.array([[4.0, 1.0], [2.0, 3.0]])


def softmax(x: Any, axis: int) -> Any:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


CASES: list[tuple[Callable[[Any], Any], Any, Any]] = [
    # reductions: an axis by position, as a list, with keepdims behind it
    (lambda t: t.sum(1), A, A.sum(1)),
    (lambda t: t.sum([0, 1]), A, A.sum()),
    (lambda t: t.sum(1, True), A, A.sum(1, keepdims=True)),
    (lambda t: t.sum(axis=(0, 2), keepdims=True), C, C.sum((0, 2), keepdims=True)),
    (lambda t: t.mean(0), A, A.mean(0)),
    (lambda t: t.prod(1), A, A.prod(1)),
    (lambda t: t.max(1), A, A.max(1)),
    (lambda t: t.amax([0, 1]), A, A.max()),
    (lambda t: t.min(), A, A.min()),
    (lambda t: t.amin(0), A, A.min(0)),
    (lambda t: t.std(), A, A.std()),
    (lambda t: t.std(1, 1), A, A.std(1, ddof=1)),
    (lambda t: t.var(1, keepdims=True), A, A.var(1, keepdims=True)),
    (lambda t: t.median(1), A, np.median(A, 1)),
    (lambda t: t.logsumexp(-1), A, np.log(np.exp(A).sum(-1))),
    (lambda t: t.norm(), A, np.linalg.norm(A)),
    (lambda t: t.norm(1, 0), A, np.abs(A).sum(0)),
    (lambda t: t.cumsum(1), A, A.cumsum(1)),
    (lambda t: t.cumprod(), A, A.cumprod()),
    (lambda t: t.trace(), S, 7.0),
    (lambda t: t.trace(1, 0, 2), C, np.trace(C, 1, 0, 2)),
    # elementwise
    (lambda t: t.exp().log().sqrt().square(), A, A),
    (lambda t: t.add(1).mul(2).sub(3).div(4), A, ((A + 1) * 2 - 3) / 4),
    (lambda t: t.pow(2).neg().abs(), A, A**2),
    (lambda t: t.maximum(3.0).minimum(5.0), A, np.clip(A, 3, 5)),
    (lambda t: t.clamp(2, 5), A, np.clip(A, 2, 5)),
    (lambda t: t.clip(max=3), A, np.clip(A, None, 3)),
    (lambda t: t.sigmoid(), A, 1 / (1 + np.exp(-A))),
    (lambda t: (-t).relu().tanh(), A, np.zeros_like(A)),
    (lambda t: (t / 3).round(1), A, np.round(A / 3, 1)),
    (lambda t: (t / 3).floor() + (t / 3).ceil(), A, np.floor(A / 3) + np.ceil(A / 3)),
    (lambda t: t.softmax(0), A, softmax(A, 0)),
    (lambda t: t.log_softmax(-1), A, np.log(softmax(A, -1))),
    (lambda t: t.reciprocal().rsqrt().log1p().expm1(), A, np.sqrt(A)),
    # products
    (lambda t: t.matmul(S), S, S @ S),
    (lambda t: t.mm(S) + t.bmm(S), S, 2 * S @ S),
    (lambda t: t.dot(S), S, S.dot(S)),
    (lambda t: t[0].outer(t[1]), A, np.outer(A[0], A[1])),
    # rearranging
    (lambda t: t.reshape(3, 2), A, A.reshape(3, 2)),
    (lambda t: t.view((3, -1)), A, A.reshape(3, 2)),
    (lambda t: t.ravel(), A.T, A.T.ravel()),
    (lambda t: t.flatten(1), C, C.reshape(2, 12)),
    (lambda t: t.unflatten(-1, (2, -1)), C, C.reshape(2, 3, 2, 2)),
    (lambda t: t.permute(0, 2, 1), C, C.transpose(0, 2, 1)),
    (lambda t: t.permute((0, 2, 1)), C, C.transpose(0, 2, 1)),
    (lambda t: t.permute([0, -1, 1]), C, C.transpose(0, 2, 1)),
    (lambda t: t.transpose(), C, C.T),
    (lambda t: t.transpose(1, 0, 2), C, C.transpose(1, 0, 2)),
    (lambda t: t.transpose(1, 2), C, C.swapaxes(1, 2)),
    (lambda t: t.transpose(1, 0), A, A.T),
    (lambda t: t.swapaxes(0, 2), C, C.swapaxes(0, 2)),
    (lambda t: t.movedim(0, -1), C, np.moveaxis(C, 0, -1)),
    (lambda t: t.unsqueeze(1).squeeze(1), A, A),
    (lambda t: t[:, :1].squeeze([1]), A, A[:, 0]),
    (lambda t: t.expand(4, -1, -1), A, np.broadcast_to(A, (4, 2, 3))),
    (lambda t: t[:, :1].expand((-1, 5)), A, np.broadcast_to(A[:, :1], (2, 5))),
    (lambda t: t[0].expand_as(t), A, np.broadcast_to(A[0], (2, 3))),
    (lambda t: t.view_as(t.T), A, A.reshape(3, 2)),
    (lambda t: t.flip(0), A, A[::-1]),
    (lambda t: t.flip(0, 1), A, A[::-1, ::-1]),
    (lambda t: t.flip([1]), A, A[:, ::-1]),
    (lambda t: t.flip(), A, A[::-1, ::-1]),
    (lambda t: t.roll(1, 1), A, np.roll(A, 1, 1)),
    (lambda t: t.roll([1, 1], [0, 1]), A, np.roll(A, (1, 1), (0, 1))),
    (lambda t: t.tile(2, 1), A, np.tile(A, (2, 1))),
    (lambda t: t.repeat(2), A, A.repeat(2)),
    (lambda t: t.repeat(2, 1), A, A.repeat(2, 1)),
    (lambda t: t.repeat_interleave(2, 0), A, A.repeat(2, 0)),
    (lambda t: t.narrow(1, 1, 2), A, A[:, 1:]),
    (lambda t: t.narrow(-1, -2, 1), A, A[:, 1:2]),
    (lambda t: t.diagonal(), C, C.diagonal()),
    (lambda t: t.diagonal(1, 0, 2), C, C.diagonal(1, 0, 2)),
    (lambda t: t.tril() + t.triu(), S, S + np.diag(np.diag(S))),
    (lambda t: t.copy() + t.clone() + t.contiguous(), A, 3 * A),
    (lambda t: t.T.contiguous(), A, A.T),
    # choosing
    (lambda t: t.sort(), A, np.sort(A)),
    (lambda t: t.sort(0, True), A, -np.sort(-A, 0)),
    (lambda t: t.topk(2)[0], A, -np.sort(-A)[:, :2]),
    (lambda t: t.take([0, 5]), A, A.take([0, 5])),
    (lambda t: t.take(ag.tensor([0, 2]), 1), A, A.take([0, 2], 1)),
    (lambda t: t.index_select(1, ag.tensor([2, 0])), A, A[:, [2, 0]]),
    (lambda t: t.gather(1, ag.tensor([[0], [2]])), A, np.take_along_axis(A, np.array([[0], [2]]), 1)),
    (lambda t: t.scatter_add(1, ag.tensor([[0, 0], [2, 1]]), ag.tensor(np.ones((2, 2)))), A, A + np.array([[2.0, 0, 0], [0, 1, 1]])),
    (lambda t: t.scatter(1, ag.tensor([[0], [2]]), ag.tensor(np.full((2, 1), 9.0))), A, np.array([[9.0, 1, 3], [2, 6, 9]])),
    (lambda t: t.index_add(0, ag.tensor([1, 1]), t), A, A + np.stack([np.zeros(3), A.sum(0)])),
    (lambda t: t.masked_fill(t > 3, -1), A, np.where(A > 3, -1, A)),
    (lambda t: t.masked_fill(ag.tensor([True, False, False]), np.float32(0.5)), A, np.where([True, False, False], 0.5, A)),
    (lambda t: t.where(t > 2, 0.0), A, np.where(A > 2, A, 0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "array", "expected"), CASES)
async def test_values_and_graph(call: Any, array: Any, expected: Any) -> None:
    for dtype, rtol in ((np.float64, 1e-12), (np.float32, 1e-5)):
        x = ag.tensor(array.astype(dtype), requires_grad=True)
        result = call(x)
        assert type(result) is ag.Tensor and result.requires_grad and result.shape == np.shape(expected)
        np.testing.assert_allclose(result.detach().numpy(), expected, rtol=rtol, atol=rtol)
    await result.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda t: t.argmax(1), A.argmax(1)), (lambda t: t.argmin(0, True), A.argmin(0, keepdims=True)), (lambda t: t.argsort(1), A.argsort(1)),
        (lambda t: t.argsort(0, True), (-A).argsort(0)), (lambda t: (t > 3).all(1), (A > 3).all(1)), (lambda t: (t > 3).any([0]), (A > 3).any(0)),
        (lambda t: t.count_nonzero(), 6), (lambda t: t.eq(1).logical_or(t.gt(5)), (A == 1) | (A > 5)),
        (lambda t: t.isnan().logical_not(), np.ones_like(A, bool)), (lambda t: t.nonzero(), np.nonzero(A)),
    ],
)  # fmt: skip
def test_what_has_no_gradient(call: Any, expected: Any) -> None:
    result = call(ag.tensor(A, requires_grad=True))
    for ours, theirs in zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]:
        assert not ours.requires_grad
        np.testing.assert_array_equal(ours.numpy(), theirs)


def test_parts() -> None:
    t = ag.tensor(C)
    for parts, expected in (
        (t.split(2, 2), np.split(C, 2, 2)), (t.split([1], 2), np.split(C, [1], 2)), (t.chunk(2, 1), [C[:, :2], C[:, 2:]]),
        (t.chunk(3, -1), [C[..., :2], C[..., 2:]]), (t.chunk(9), [C[:1], C[1:]]), (t.unbind(1), list(C.swapaxes(0, 1))),
    ):
        assert isinstance(parts, tuple) and len(parts) == len(expected)
        for ours, theirs in zip(parts, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)  # fmt: skip


def test_flatten_of_nothing() -> None:
    assert ag.tensor(np.zeros((0, 3))).flatten().shape == (0,) and ag.tensor(np.zeros((2, 0, 3))).flatten(1).shape == (2, 0)
    assert ag.tensor(1.0).flatten().shape == (1,)


def test_dtypes_and_counts() -> None:
    t = ag.tensor(A)
    for name, dtype in (("half", "float16"), ("float", "float32"), ("double", "float64"), ("long", "int64"), ("int", "int32"), ("bool", "bool")):
        assert getattr(t, name)().dtype == np.dtype(dtype)
    assert t.double() is t and t.contiguous() is t and t.T.contiguous() is not t
    assert t.numel() == t.size == 6 and t.dim() == t.ndim == 2
    assert ag.tensor(A.astype(np.float32)).masked_fill(ag.tensor(True), ag.tensor(np.float64(2.0))).dtype == np.float32
    z = ag.tensor([1 + 2j])
    assert z.real.tolist() == [1.0] and z.imag.tolist() == [2.0] and z.conj().tolist() == z.conjugate().tolist() == [1 - 2j]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda t: t.chunk(0), ArgumentError), (lambda t: t.chunk(2, 5), IndexRangeError), (lambda t: t.narrow(1, 2, 2), IndexRangeError),
        (lambda t: t.narrow(1, 0, -1), IndexRangeError), (lambda t: t.narrow(2, 0, 1), IndexRangeError),
        (lambda t: t.unflatten(3, (1, 1)), IndexRangeError), (lambda t: t.unflatten(1, (2, 2)), ShapeError), (lambda t: t.expand(3), ShapeError),
        (lambda t: t.expand(3, 7), ShapeError), (lambda t: t.masked_fill(np.ones((4, 2, 3), bool), 0.0), ShapeError),
        (lambda t: t.permute(0, 0), ShapeError), (lambda t: t.add("a"), ArgumentTypeError), (lambda t: t.matmul("a"), ArgumentTypeError),
        (lambda t: t.sum(axis="a"), ArgumentTypeError), (lambda t: t.index_select(0, [0.5]), ArgumentTypeError),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Any, error: type[Exception]) -> None:
    assert_raises(error, None, lambda: call(ag.tensor(A, requires_grad=True)))


def test_the_table_is_what_tensors_have() -> None:
    assert [name for name in EVERYDAY if not hasattr(ag.Tensor, name)] == []
    for name, method in METHODS.items():
        assert getattr(ag.Tensor, name) is method and not hasattr(TensorCore, name), name
        assert inspect.getdoc(method), name
        first = next(iter(inspect.signature(method).parameters.values()))
        assert first.kind is first.POSITIONAL_ONLY, name
    text = pydoc.plain(pydoc.render_doc(ag.Tensor))
    assert "softmax(x" in text and "Slices at `index` along an axis." in text


def test_the_stub_declares_the_methods_that_are_there() -> None:
    assert PATH.read_text(encoding="utf-8") == stub(), "run: python -m tests.method_stub"


def test_a_type_checker_knows_the_methods() -> None:
    t = ag.tensor(A)
    assert_type(t.exp(), ag.Tensor)
    assert_type(t.softmax(1), ag.Tensor)
    assert_type(t.reshape(3, 2).sum([0], keepdims=True), ag.Tensor)
    assert_type(t.float().add(1), ag.Tensor)
    assert_type(t.chunk(2), tuple[ag.Tensor, ...])
    assert_type(t.numel(), int)
