"""Wrong calls: one typed error that says what was attempted, found and expected, and nothing has changed.

Many more stand beside the features they belong to; here are those that any user meets first, and what all errors have in common.
"""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import errors
from aiograd.errors import (
    AiogradError,
    ArgumentError,
    ArgumentTypeError,
    IndexRangeError,
    LoopError,
    ShapeError,
)
from tests.support import assert_raises, leaf

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, AiogradError)]


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls is not AiogradError], ids=lambda cls: cls.__name__)
def test_every_error_is_also_the_builtin_that_a_caller_would_catch(cls: type[Exception]) -> None:
    bases = [base for base in cls.__mro__ if base.__module__ == "builtins" and base not in (Exception, BaseException, builtins.object)]
    assert bases, f"{cls.__name__} is no builtin exception"
    assert cls.__doc__
    assert cls.__name__ in (errors.__doc__ or "")


# -------------------------------------------------------------------- operations


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: x + ag.tensor([1.0, 2.0, 3.0]), ShapeError, r"add\(float64 \[2\], float32 \[3\]\): operands could not be broadcast"),
        (lambda x: x @ ag.tensor([[1.0, 2.0, 3.0]]), ShapeError, "matmul"),
        (lambda x: x.sum(axis=3), IndexRangeError, "sum.*axis 3 is out of bounds"),
        (lambda x: x.reshape(3, 5), ShapeError, "cannot reshape|reshape"),
        (lambda x: x[7], IndexRangeError, "index 7 is out of bounds"),
        (lambda x: x[0, 0], IndexRangeError, "too many indices"),
        (lambda x: x["a"], IndexRangeError, "index"),
        (lambda x: x[ag.tensor([0, 9])], IndexRangeError, "index"),
        (lambda x: np.concatenate([x, ag.tensor([[1.0]])]), ShapeError, "dimension"),
        (lambda x: np.exp(x, dtype="nonsense"), ArgumentTypeError, "nonsense"),
        (lambda x: np.linalg.inv(x), (ArgumentError, np.linalg.LinAlgError), "dimension"),
        (lambda x: np.unwrap(x.detach().requires_grad_()), errors.NoRuleError, "has no row in aiograd's tables"),
        (lambda x: np.sum(x, axis="a"), ArgumentTypeError, "sum"),
        (lambda x: x.item(), ShapeError, "only tensors of one element"),
        (lambda x: bool(x), ShapeError, "ambiguous"),
        (lambda x: float(x), ShapeError, "one element"),
        (lambda x: x.astype("nonsense"), ArgumentTypeError, "nonsense"),
        (lambda x: x.to("nowhere:0"), errors.DeviceError, "no such device"),
        (lambda x: ag.tensor(["a"]), ArgumentTypeError, "expected numbers"),
        (lambda x: ag.tensor(np.array(["a"])), ArgumentTypeError, "expected numbers"),
        (lambda x: ag.tensor([[1.0], [1.0, 2.0]]), ShapeError, "same length"),
        (lambda x: ag.tensor(None), ArgumentTypeError, "expected numbers"),
        (lambda x: ag.tensor([1.0], dtype="nonsense"), ArgumentTypeError, "nonsense"),
        (lambda x: ag.tensor([1.0], dtype=object), ArgumentTypeError, "dtype of numbers"),
        (lambda x: ag.tensor([1j], dtype=float), ArgumentTypeError, "complex numbers do not fit"),
        (lambda x: ag.tensor([1], requires_grad=True), ArgumentTypeError, "only tensors of floating point and complex dtype"),
        (lambda x: ag.asarray("text"), ArgumentTypeError, "expected numbers"),
        (lambda x: ag.from_numpy([1.0]), ArgumentTypeError, "expected an ndarray"),
        (lambda x: ag.asarray([1, 2], copy=False), ArgumentError, "copy=False"),
        (lambda x: ag.asarray(np.ones(2), dtype=np.float32, copy=False), ArgumentError, "copy=False"),
        (lambda x: x + np.array(["a", "b"]), TypeError, "."),
    ],
)
def test_an_operation_that_cannot_be(call: Any, error: Any, words: str, grad: bool) -> None:
    x = leaf([1.0, 2.0]) if grad else ag.tensor([1.0, 2.0], dtype=np.float64)
    assert_raises(error, words, call, x)
    assert x.version == 0 and x.grad is None and x.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "operate",
    [lambda t: t + "a", lambda t: "a" * t, lambda t: t - None, lambda t: {} @ t, lambda t: t < "a", lambda t: t ** [None]],
)
def test_an_operator_with_something_that_is_no_number_is_pythons_type_error(operate: Any) -> None:
    assert_raises(TypeError, None, lambda: operate(leaf([1.0, 2.0])))


def test_a_message_never_holds_a_whole_array() -> None:
    big = ag.tensor(np.arange(100_000.0))
    with pytest.raises(ShapeError) as caught:
        _ = big + ag.tensor(np.arange(7.0))
    assert len(str(caught.value)) < 300


# -------------------------------------------------------------------- passes


async def test_a_loss_that_is_no_scalar() -> None:
    x = leaf([1.0, 2.0])
    with pytest.raises(ShapeError, match=r"grad can be implicitly created only for scalar outputs; output 0 has shape \[2\]. Pass its gradient."):
        await (x * 2).backward()
    assert x.grad is None


@pytest.mark.parametrize("start", [lambda y, x: y.backward(), lambda y, x: ag.backward(y), lambda y, x: ag.grad(y, x)])
def test_a_pass_without_a_running_loop(start: Any) -> None:
    x = leaf([1.0])
    y = (x * x).sum()
    assert_raises(LoopError, r"without a running event loop: await it inside a coroutine, started with aiograd.run\(main\(\)\)", start, y, x)
    assert x.grad is None


async def test_a_coroutine_that_is_never_awaited() -> None:
    x = leaf([1.0])
    y = (x * x).sum()
    for start in (lambda: y.backward(), lambda: ag.grad(y, x)):
        with pytest.warns(RuntimeWarning, match="was never awaited"):
            start()
    assert x.grad is None
    await y.backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda y: y.backward(retain_graph=True, nonsense=1),
        lambda y: ag.grad(y),
        lambda y: ag.backward(),
    ],
)
async def test_arguments_that_do_not_exist(call: Any) -> None:
    assert_raises(TypeError, None, lambda: call(leaf(1.0) * 2))


async def test_nothing_runs_before_it_is_awaited_and_checks_are_made_at_once() -> None:
    x = leaf([1.0])
    seen: list[int] = []
    y = x * 2
    y.register_hook(lambda g: seen.append(1))
    coroutine = y.sum().backward()
    await asyncio.sleep(0)
    assert seen == []
    await coroutine
    assert seen == [1]
    assert_raises(ShapeError, None, lambda: (leaf([1.0, 2.0]) * 2).backward())  # type: ignore[unused-coroutine]


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 1.5}, {"threads": 1.5}, {"threads": True}, {"blas_threads": "a"}, {"concurrency": 0},
        {"budget": "a"}, {"cancel_grace": None}, {"inline_ns": 0},
    ],
)  # fmt: skip
def test_an_engine_says_which_setting_makes_no_sense(wrong: dict[str, Any]) -> None:
    assert_raises(ArgumentError, rf"Engine\({next(iter(wrong))}=", lambda: ag.Engine(**wrong))
