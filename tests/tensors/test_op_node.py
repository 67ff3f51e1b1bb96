"""The compiled code of rows: what computes some of the gradients only, and the check of versions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GraphFreedError, ModifiedError
from aiograd.nn import functional as F
from aiograd.ops import ROWS as ALL_ROWS
from aiograd.ops import linalg
from aiograd.running.modes import ModeScope
from tests.support import assert_raises

values = np.random.default_rng(3)


def drawn(shape: tuple[int, ...], dtype: Any) -> Any:
    made = values.uniform(-1.0, 1.0, shape)
    if np.dtype(dtype).kind == "c":
        made = made + 1j * values.uniform(-1.0, 1.0, shape)
    return made.astype(dtype)


def matrix(dtype: Any = np.float64) -> Any:
    return ag.tensor(drawn((3, 3), dtype), requires_grad=True)


def ready(array: Any) -> Any:
    return None if array is None else np.asarray(array).tobytes()


ROWS: dict[str, Callable[..., Any]] = {
    "multiply": lambda: matrix() * matrix(),
    "matmul": lambda: matrix() @ matrix(),
    "complex": lambda: matrix(np.complex128) @ matrix(np.complex128),
    "holomorphic": lambda: matrix(np.complex128) / matrix(np.complex128),
    "linear": lambda: F.linear(matrix(), matrix(), matrix()[0]),
    "joint": lambda: F.layer_norm(matrix(), (3,), matrix()[0], matrix()[1]),
    "variadic": lambda: ag.concat([matrix(), matrix(), matrix()], axis=0),
    "several outputs": lambda: ag.unstack(matrix())[1],
    "output saved": lambda: np.exp(matrix()),
    "attention": lambda: F.scaled_dot_product_attention(matrix(), matrix(), matrix()),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_part_is_what_the_whole_has_there(row: str) -> None:
    node: Any = ROWS[row]().grad_fn
    grads = [drawn(metadata.shape, metadata.dtype) for metadata in node.input_metadata]
    whole = node.vjp(grads[0] if node.is_single else grads)
    assert any(grad is not None for grad in whole)
    for needs in itertools.product(*[[False] if child is None else [False, True] for child in node.next_nodes]):
        part = node.vjp_part(grads[0] if node.is_single else grads, needs)
        assert list(map(ready, part)) == [ready(grad) if need else None for grad, need in zip(whole, needs, strict=True)], needs
        assert list(map(ready, node.compute(grads, needs, None, False))) == list(map(ready, part))


def test_a_part_runs_no_rule_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = (matrix() @ matrix()).grad_fn
    calls: list[int] = []
    original = linalg.product
    monkeypatch.setattr(linalg, "product", lambda *args: calls.append(1) or original(*args))
    node.vjp_part(np.ones((3, 3)), (True, False))
    assert len(calls) == 1
    node.vjp_part(np.ones((3, 3)), (False, False))
    assert len(calls) == 1


@pytest.mark.parametrize("changed", [0, 1])
def test_what_was_modified_before_may_be_used_and_what_is_modified_later_may_not(changed: int) -> None:
    x, w = matrix(), matrix()
    with ag.no_grad():
        w += 1.0
    node: Any = (x @ w).grad_fn
    for needs in ((True, False), (False, True)):
        node.vjp_part(np.ones((3, 3)), needs)
    node.vjp(np.ones((3, 3)))
    with ag.no_grad():
        (x, w)[changed][0] = 0.0
    for needs in ((True, False), (False, True)):
        with pytest.raises(ModifiedError, match=f"x{changed + 1} of matmul .* is at version {changed + 1}; expected version {changed}"):
            node.vjp_part(np.ones((3, 3)), needs)
    assert_raises(ModifiedError, f"x{changed + 1} of matmul", lambda: node.vjp(np.ones((3, 3))))


def test_an_output_that_was_modified_is_found_although_an_argument_had_been() -> None:
    x = matrix()
    with ag.no_grad():
        x += 1.0
    y = np.exp(x)
    node: Any = y.grad_fn
    with ag.no_grad():
        y[0] = 0.0
    assert_raises(ModifiedError, "out of exp", lambda: node.vjp(np.ones((3, 3))))


def test_a_part_of_a_released_node() -> None:
    node: Any = (matrix() @ matrix()).grad_fn
    node.release_variables()
    assert_raises(GraphFreedError, None, lambda: node.vjp_part(np.ones((3, 3)), (True, False)))


RECORDED: dict[str, Callable[[], Any]] = {
    "tanh": lambda: np.tanh(matrix()),
    "tanh_slope": lambda: ALL_ROWS["tanh_slope"](matrix(), matrix()),
    "tanh_bend": lambda: ALL_ROWS["tanh_bend"](matrix(), matrix(), matrix()),
    "matmul": lambda: matrix() @ matrix(),
    "linear": lambda: F.linear(matrix(), matrix()),
    "cat": lambda: ag.concat([matrix(), matrix()], axis=1),
}


def test_every_row_with_rules_for_recorded_passes_is_tested_here() -> None:
    assert {name for name, op in ALL_ROWS.items() if op.recorded} == set(RECORDED)


@pytest.mark.parametrize("row", RECORDED)
def test_rules_for_recorded_passes_agree_with_the_others_and_record_less(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = RECORDED[row]().grad_fn
    op = node.row.op
    grads = [ag.tensor(drawn(node.shape, node.dtype), requires_grad=True)]

    def recorded(needs: tuple[bool, ...], values: Any) -> tuple[list[Any], int]:
        nodes: list[Any] = []
        with ModeScope(collect=nodes.append):
            return [None if grad is None else grad.detach().numpy() for grad in node.compute(grads, needs, values, True)], len(nodes)

    for needs in itertools.product(*[[False] if child is None else [False, True] for child in node.next_nodes]):
        if not any(needs):
            continue
        saved, count = recorded(needs, None)
        # as where hooks of saved tensors give the values, in a checkpoint for instance: the same rules, so the same bits
        unpacked, unpacked_count = recorded(needs, node._saved)
        with monkeypatch.context() as patch:
            patch.setattr(type(node), "row", node.row._replace(plain=op.rule_plan(op.rules, op.joint)))
            plain, plain_count = recorded(needs, node._saved)
        assert 0 < count == unpacked_count <= plain_count
        for mine, same, other, need in zip(saved, unpacked, plain, needs, strict=True):
            assert (mine is not None) == (same is not None) == (other is not None) == need
            if need:
                np.testing.assert_array_equal(mine, same)
                np.testing.assert_allclose(mine, other, rtol=1e-14)
