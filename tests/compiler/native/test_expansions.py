"""Cross entropy inside of native functions: the bits of its kernel, and the kernel itself where the targets are not plain classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import aiograd as ag
import aiograd.nn.functional as F
from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.compiler.native.lowering import reason_against
from aiograd.ops import nn_loss
from tests.compiler.native.codes import Both, needs_native, special
from tests.sweeps import swept

pytestmark = [needs_native, pytest.mark.usefixtures("sizes")]

PLAIN = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
SHAPES = ((8, 10), (1, 2), (1, 5), (3, 7), (16, 16), (17, 33), (2, 2048), (2048, 2), (64, 64))


def ref(name: str, array: Any) -> Ref:
    return Ref(name, array.shape, array.dtype, array.strides)


def kernel(logits: Any, target: Any, **options: Any) -> tuple[Call, tuple[Ref, ...]]:
    """The call of the kernel as a program has it, and the parameters."""
    given = ref("logits", logits), ref("target", target)
    results = Ref("loss", (), logits.dtype, ()), Ref("shift"), Ref("total"), Ref("slope")
    statics = {"target": given[1], **PLAIN, **options}
    call = Call(Form.CALL, nn_loss._fused_cross_entropy, "cross_entropy_fused", (given[0],), results, statics, unpacks=True)
    return call, given


def code_of(given: tuple[Ref, ...], *calls: Call) -> ArrayCode:
    """The code of some calls, the kernel's the last one."""
    loss, *others = calls[-1].results
    array = Ref("array", (), loss.dtype, ())
    return ArrayCode("f", given, (*calls, Call(Form.CALL, np.asarray, "asarray", (loss,), (array,))), (array, others))


def both_of(logits: Any, target: Any) -> Both:
    call, given = kernel(logits, target)
    return Both(code_of(given, call))


def bits_of(results: Any) -> list[Any]:
    loss, others = results
    return [None if each is None else np.asarray(each).tobytes() for each in (loss, *others)]


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("shape", swept(map(pytest.param, SHAPES), keep=4), ids=str)
@pytest.mark.parametrize("char", "fd")
def test_loss_and_slope(char: str, shape: tuple[int, int], checked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tame logits, and of rows with infinities, NaNs, zeros of both signs and denormals."""
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", checked)
    rng = np.random.default_rng(0)
    tame = rng.standard_normal(shape).astype(char)
    target = rng.integers(0, shape[1], shape[0])
    both = both_of(tame, target)
    wild = [special(np.dtype(char), tame.size, seed).reshape(shape) for seed in range(3)]
    for logits in (tame, tame * 100, np.zeros_like(tame), -np.zeros_like(tame), np.full_like(tame, -np.inf), *wild):
        both.check([logits, target])
        both.check([logits, target[::-1].copy()])


def test_targets_that_lie_apart_or_are_computed() -> None:
    logits, target = np.random.default_rng(0).standard_normal((8, 10)).astype("f"), np.arange(16)[::2] % 10
    both_of(logits, target).check([logits, target])
    call, (x, _) = kernel(logits, target)
    one, two = ref("one", target), Ref("target", (8,), np.dtype(int), (8,))
    added = Call(Form.CALL, np.add, "add", (one, 1), (two,), fresh=True)
    call = call.replaced({call.options["target"]: two})
    both = Both(code_of((x, one), added, call))
    both.check([logits, target // 2])
    far = np.where(np.arange(16) == 6, -101, 0)[::2]
    assert bits_of(both.native(logits, far)) == bits_of(both.plain(logits, far)) and both.asked == 1


@pytest.mark.parametrize("wrong", [10, 11, -1, 1 << 40, -(1 << 62)])
def test_a_class_out_of_range(wrong: int) -> None:
    """The kernel raises its error, and an ignored target counts for nothing; the next call is native again."""
    logits, target = np.random.default_rng(0).standard_normal((8, 10)).astype("f"), np.arange(8)
    both = both_of(logits, target)
    bad = np.where(target == 7, wrong, target)
    errors = []
    for function in (both.native, both.plain):
        with pytest.raises(ag.errors.ArgumentError) as caught:
            function(logits, bad)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and both.asked == 1
    both.check([logits, target])
    ignored = np.where(target == 7, -100, target)
    assert bits_of(both.native(logits, ignored)) == bits_of(both.plain(logits, ignored)) and both.asked == 2


X = np.random.default_rng(0).standard_normal((6, 4)).astype("f")
T = np.array([0, 3, 1, 1, 2, 0])
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "weight": (X, T, {"weight": np.array([0.5, 1.0, 2.0, 0.0], "f")}),
    "smoothing": (X, T, {"label_smoothing": 0.1}),
    "sum": (X, T, {"reduction": "sum"}),
    "none": (X, T, {"reduction": "none"}),
    "a class that is ignored": (X, T, {"ignore_index": 1}),
    "all at once": (X, T, {"weight": np.array([0.5, 1.0, 2.0, 0.0], "f"), "label_smoothing": 0.2, "ignore_index": 0, "reduction": "sum"}),
    "half": (X.astype(np.float16), T, {}),
    "int32 targets": (X, T.astype(np.int32), {}),
    "one row without an axis": (X[0], np.int64(2), {}),
    "images": (np.ones((2, 3, 2, 2), "f") * np.arange(3, dtype="f")[:, None, None], np.ones((2, 2, 2), np.int64), {}),
    "many": (np.random.default_rng(0).standard_normal((64, 65)).astype("f"), np.arange(64), {}),
    "one class": (X[:, :1].copy(), T * 0, {}),
    "columns first": (np.asfortranarray(X), T, {}),
}  # fmt: skip


async def passes(function: Any, runs: Sequence[tuple[Any, Any]]) -> list[bytes]:
    found = []
    for logits, target in runs:
        x = ag.tensor(logits, requires_grad=True)
        loss = function(x, ag.tensor(target))
        await (loss if loss.ndim == 0 else loss.sum()).backward()
        found += [loss.numpy().tobytes(), x.grad.numpy().tobytes()]
    return found


@pytest.mark.parametrize("name", OTHERS)
async def test_other_arguments_stay_with_the_kernel(name: str) -> None:
    logits, target, options = OTHERS[name]
    call, _ = kernel(logits, np.asarray(target), **options)
    assert reason_against(call).startswith("cross_entropy ")

    def loss_of(x: Any, labels: Any) -> Any:
        return F.cross_entropy((x * 2.0 + 1.0).relu() * x, labels, **options) * 2.0

    compiled = ag.compile(loss_of, tier="native")
    runs = [(logits, target)] * 3
    assert await passes(compiled, runs) == await passes(loss_of, runs)
    assert compiled.statistics().native_runs or logits.dtype == np.float16


async def test_no_rows() -> None:
    call, _ = kernel(np.ones((0, 4), "f"), np.ones(0, np.int64))
    assert reason_against(call)


@pytest.mark.parametrize("first", ["plain", "ignored"])
async def test_a_program_with_targets_that_are_ignored_now_and_then(first: str) -> None:
    """Residuals are None or arrays by the run; the backward takes both."""
    ignored = np.where(T == 1, -100, T)
    order = [T, T, ignored, T[::-1].copy(), ignored] if first == "plain" else [ignored, T, ignored, T]

    def loss_of(x: Any, labels: Any) -> Any:
        return F.cross_entropy(ag.tanh(x) * 3.0, labels) * 2.0

    compiled = ag.compile(loss_of, tier="native")
    runs = [(X, target) for target in order]
    assert await passes(compiled, runs) == await passes(loss_of, runs)
    with pytest.raises(ag.errors.ArgumentError, match="target"):
        compiled(ag.tensor(X, requires_grad=True), ag.tensor(np.where(T == 1, 4, T)))
    assert await passes(compiled, runs) == await passes(loss_of, runs)
    (program,) = compiled.programs
    if first == "plain":
        assert program.native.fallbacks == {}
        made = next(value.name for statement in program.statements if statement.op.name == "cross_entropy" for value in statement.outputs)
        assert program.marks()[made] in ("loop", "fused 1", "fused 2")


async def test_a_graph_of_the_gradient() -> None:
    """Second derivatives of a compiled loss have the bits of the eager one."""

    def loss_of(x: Any) -> Any:
        return F.cross_entropy(x * x, T)

    found = []
    for function in (loss_of, ag.compile(loss_of, tier="native")):
        x = ag.tensor(X, requires_grad=True)
        for _ in range(2):
            (slope,) = await ag.grad(function(x), [x], create_graph=True)
            (second,) = await ag.grad((slope * slope).sum(), [x])
        found.append((slope.detach().numpy().tobytes(), second.numpy().tobytes()))
    assert found[0] == found[1]


def test_arrays_of_complex_numbers_are_left_to_numpy() -> None:
    """LLVM has no type for them, so neither zeros nor a store is tried."""
    dtype = np.dtype(np.complex64)
    zeros, part, whole = Ref("zeros", (4,), dtype, (8,)), Ref("part", (2,), dtype, (8,)), Ref("whole", (4,), dtype, (8,))
    filling = Call(Form.CALL, np.zeros, "zeros", ((4,), dtype), (zeros,), fresh=True)
    store = Call(Form.STORE, None, "", (part, (slice(1, 3),)), (whole,), out=zeros)
    assert reason_against(filling, frozenset()) == "zeros of complex64"
    assert reason_against(store, frozenset([zeros])) == "a store into complex64"
