"""The passes, one by one, on code that is traced from functions of arrays: what each changes, what it must leave, and that no bit changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.compiler.passes import PASSES, optimized
from aiograd.compiler.passes.arenas import with_arena
from aiograd.compiler.passes.common import with_common_calls_once
from aiograd.compiler.passes.constants import with_constants
from aiograd.compiler.passes.dead import without_dead_code
from aiograd.compiler.passes.layouts import with_equal_layouts
from aiograd.compiler.passes.products import with_products_by_dot
from aiograd.compiler.passes.reuse import with_memory_reused
from aiograd.compiler.passes.slices import with_slices_joined
from aiograd.compiler.source import Names, SourceFile, load, text_of
from aiograd.compiler.tracing import Recorded, Tracer, Untraceable
from aiograd.ops import ROWS
from aiograd.ops.special import sigmoid
from aiograd.running.trees import map_tree
from tests.support import assert_raises

rng = np.random.default_rng(0)


def drawn(*shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def traced(function: Callable[..., Any], *arrays: Any) -> ArrayCode:
    """The code of a function of arrays."""
    tracer = Tracer("t")
    with tracer.watching():
        recorded = [tracer.recorded(f"x{i}", array) for i, array in enumerate(arrays)]
        results = tracer.trace(function, tuple(recorded))
    return ArrayCode("f", tuple([each.ref for each in recorded]), tuple(tracer.calls), map_tree(lambda each: each.ref, results, Recorded))


def run(code: ArrayCode, *arrays: Any) -> Any:
    return load(code, SourceFile())(*arrays)


def names(code: ArrayCode) -> list[str]:
    return [call.label for call in code.calls if call.label]


def bits(results: Any) -> list[Any]:
    found = results if isinstance(results, (tuple, list)) else [results]
    return [(each.shape, each.dtype, each.strides, each.tobytes()) for each in found]


def effect(*refs: Ref) -> Call:
    """A call that may change arrays."""
    return Call(Form.CALL, lambda *arrays: None, "effect", refs, (), pure=False)


# -------------------------------------------------------------------- one by one


def test_dead_code_goes_and_effects_stay() -> None:
    def f(x: Any) -> Any:
        np.exp(np.tanh(x))
        return x + x

    code = traced(f, drawn(3))
    code = ArrayCode(code.name, code.parameters, (*code.calls, effect(code.calls[0].results[0])), code.results)
    assert names(without_dead_code(code)) == ["tanh", "add", "effect"]


def test_calls_of_constants_are_done_once_and_numbers_become_arrays() -> None:
    tracer = Tracer("t")
    x = tracer.recorded("x0", drawn(3))
    zeros = tracer.add(Form.CALL, np.zeros, "zeros", ((3,), np.float32), {}, np.zeros(3, np.float32), fresh=True)
    seen = tracer.add(Form.CALL, np.zeros, "zeros", ((3,), np.float32), {}, np.zeros(3, np.float32), fresh=True)
    result = (x + zeros) * 0.1
    code = ArrayCode("f", (x.ref,), tuple(tracer.calls), (result.ref, seen.ref))
    found = with_constants(code)
    assert names(found) == ["zeros", "add", "multiply"] and isinstance(found.calls[2].arguments[1], np.ndarray)
    function = load(found, SourceFile())
    first, second = function(x.value), function(x.value)
    assert bits(first) == bits(second) == bits([x.value * np.float32(0.1), np.zeros(3, np.float32)])
    assert first[1] is not second[1]


@pytest.mark.parametrize("number", [2, 0.1, 1e300, True])
def test_numbers_keep_their_meaning(number: Any) -> None:
    for x in (drawn(3), drawn(3, dtype=np.float64), np.arange(3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = traced(lambda x: x * number, x)
            assert bits(run(with_constants(code), x)) == bits(x * number)


def test_common_calls_are_done_once() -> None:
    def f(x: Any, y: Any) -> Any:
        return x[0:2] * y + x[0:2] * y, x.T

    x, y = drawn(3), drawn(2)
    code = with_common_calls_once(traced(f, x, y))
    assert names(code) == ["multiply", "add", "T"] and bits(run(code, x, y)) == bits(f(x, y))


def test_what_others_see_is_written_into_or_lies_across_an_effect_is_not_common() -> None:
    code = traced(lambda x, y: (x * y, x * y), drawn(2), drawn(2))
    assert names(with_common_calls_once(code)) == ["multiply", "multiply"]

    def f(x: Any) -> Any:
        total = x + x
        total += x
        return total * (x + x)

    assert names(with_common_calls_once(traced(f, drawn(2)))).count("add") == 3

    code = traced(lambda x: np.exp(x) + np.exp(x), drawn(2))
    first, second, added = code.calls
    (x,) = code.given()
    code = ArrayCode("f", code.parameters, (first, effect(x), second, added), code.results)
    assert names(with_common_calls_once(code)).count("exp") == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_products_have_the_bits_of_matmul_and_the_others_stay(dtype: Any) -> None:
    random = Random(1)
    for _ in range(60):
        m, k, n = (random.randint(2, 40) for _ in range(3))
        one, other = (drawn(*shape, dtype=dtype).copy(random.choice("CF")) for shape in ((m, k), (k, n)))
        if random.random() < 0.2:
            other = one.T
        code = with_products_by_dot(traced(lambda x, y: x @ y, one, other))
        assert names(code) == ["dot"] and bits(run(code, one, other)) == bits(one @ other)
    for shapes in (((2, 3, 4), (4, 5)), ((4,), (4, 5)), ((3, 1), (1, 5)), ((1, 4), (4, 5))):
        arrays = [drawn(*shape, dtype=dtype) for shape in shapes]
        assert names(with_products_by_dot(traced(lambda x, y: x @ y, *arrays))) == ["matmul"]
    parts = [drawn(6, 6, dtype=dtype)[::2, 1:5], drawn(4, 5, dtype=dtype)]
    assert names(with_products_by_dot(traced(lambda x, y: x @ y, *parts))) == ["matmul"]


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_a_matrix_whose_memory_repeats_is_copied_before_a_product(dtype: Any) -> None:
    """As `numpy.dot` does itself."""
    row, number, other = drawn(4, dtype=dtype), drawn(1, dtype=dtype), drawn(4, 5, dtype=dtype)
    for part, first in ((row, lambda x: np.broadcast_to(x, (300, 4))), (number, lambda x: np.broadcast_to(x, (300, 4)).T.swapaxes(0, 1))):
        code = with_products_by_dot(traced(lambda x, y, first=first: first(x).dot(y), part, other))
        assert names(code)[-2:] == ["copy", "dot"] and bits(run(code, part, other)) == bits(first(part).dot(other))
    assert "copy" not in names(with_products_by_dot(traced(lambda x, y: x.T.dot(y), drawn(4, 3), drawn(4, 5))))


def spread(grads: Any, places: Any, shape: Any) -> Any:
    """The sum of gradients of parts, as the backward writes it."""
    adjoint = ROWS["getitem_adjoint"]
    total = None
    for grad, place in zip(grads, places, strict=True):
        part = adjoint(grad, index=place, shape=shape)
        total = part if total is None else total + part
    return total


def test_the_gradients_of_all_parts_are_put_together() -> None:
    whole, places = (3, 8), [np.s_[:, 4:8], np.s_[:, 0:4]]
    grads = [drawn(3, 4), np.full((3, 4), -0.0, np.float32)]
    code = without_dead_code(with_slices_joined(traced(lambda *grads: spread(grads, places, whole) * 2, *grads)))
    assert names(code) == ["empty", "add", "multiply"] and bits(run(code, *grads)) == bits(spread(grads, places, whole) * 2)


@pytest.mark.parametrize("place", [np.s_[:, 4:8], np.s_[::2, 1:5], np.s_[1], np.s_[..., None, 3]])
def test_the_gradient_of_one_part_is_zeros_and_a_store(place: Any) -> None:
    grads = [drawn(*np.empty((3, 8))[place].shape)]
    code = with_slices_joined(traced(lambda *grads: spread(grads, [place], (3, 8)) * 2, *grads))
    assert names(code) == ["zeros", "multiply"] and bits(run(code, *grads)) == bits(spread(grads, [place], (3, 8)) * 2)


@pytest.mark.parametrize(
    "places",
    [[np.s_[:, 0:4], np.s_[:, 3:7]], [np.s_[:, 0:4], np.s_[:, 5:9]], [np.s_[0:3, 0:4], np.s_[:, 4:8]], [np.s_[:, 4:0:-1]] * 2],
)
def test_other_parts_are_added_up(places: Any) -> None:
    grads = [drawn(3, 4), drawn(3, 4)]
    code = with_slices_joined(traced(lambda *grads: spread(grads, places, (3, 9)), *grads))
    assert "empty" not in names(code) and bits(run(code, *grads)) == bits(spread(grads, places, (3, 9)))


def test_large_arrays_are_dropped_after_their_last_use_not_after_the_first_store() -> None:
    places, rows = [np.s_[:, 0:4], np.s_[:, 5:9], np.s_[:, 2:6]], 3000
    grads = [drawn(rows, 4) for _ in places]
    code = with_slices_joined(traced(lambda *grads: spread(grads, places, (rows, 9)) * 2, *grads))
    assert names(code).count("zeros") == 3 and "del " in text_of(code, Names())
    assert bits(run(code, *grads)) == bits(spread(grads, places, (rows, 9)) * 2)


def test_operands_are_laid_out_alike() -> None:
    def f(x: Any, bias: Any) -> Any:
        return (x[:, 1:3] + bias) * bias, np.tanh(x[:, 1:3])

    x, bias = drawn(3, 4), drawn(2)
    code = with_equal_layouts(with_common_calls_once(traced(f, x, bias)))
    assert bits(run(code, x, bias)) == bits(f(x, bias))
    assert names(code) == ["add", "empty", "multiply", "tanh"]  # two operands of the sum would have to be copied
    code = with_equal_layouts(traced(lambda x: -x[:, 1:3], x))
    assert names(code) == ["copy", "negative"] and bits(run(code, x)) == bits(-x[:, 1:3])
    assert names(with_equal_layouts(traced(lambda x: -x[:, 1:], drawn(100, 100)))) == ["negative"]
    assert names(with_equal_layouts(traced(lambda x: -x[:, 1:], drawn(3, 3, dtype=np.complex64)))) == ["negative"]


def test_copies_of_an_operand_across_an_effect_have_memory_each() -> None:
    """The free memory of the first is written to while the second is in use; in an arena both are there from the beginning."""

    def waiting(x: Any, y: Any, row: Any) -> Any:
        return x > row, y > row, np.exp(y).T, x < row, np.exp(y) * 2.0

    def together(x: Any, y: Any, row: Any) -> Any:
        first, second = x * row, y * row
        return np.add.reduce(second + first, axis=0)

    x, y, bias = drawn(4, 3), drawn(4, 3), drawn(3)
    for f in (waiting, together):
        code = traced(f, x, y, bias)
        code = with_equal_layouts(ArrayCode("f", code.parameters, (code.calls[0], effect(), *code.calls[1:]), code.results))
        assert names(code).count("empty") == 2
        code = with_memory_reused(code)
        assert bits(run(code, x, y, bias)) == bits(f(x, y, bias)), f
    code = with_arena(code)
    arena = tuple([np.empty(ref.shape or (), ref.dtype) for ref in code.arena])
    assert arena and bits(run(code, x, y, bias, arena)) == bits(together(x, y, bias))


def test_memory_is_reused_where_nobody_reads_it_any_more() -> None:
    code = traced(lambda x, y: np.tanh(x * y + x) * y, drawn(3), drawn(3))
    found = with_memory_reused(code)
    product, total, tanh, last = found.calls
    assert total.out is product.results[0] and last.out is tanh.results[0]
    assert tanh.out is None  # not exact, and no other memory is free
    x, y = drawn(3), drawn(3)
    assert bits(run(found, x, y)) == bits(np.tanh(x * y + x) * y)


def test_memory_that_others_have_is_left_alone() -> None:
    def f(x: Any, y: Any) -> Any:
        product = x * y
        view = product[0:2]
        column = (x + y).reshape(3, 1)
        kept = x - y
        return kept * 2 + column[:, 0], view * 3, kept, column.T + y

    x, y = drawn(3), drawn(3)
    code = with_memory_reused(traced(f, x, y))
    copies = x.copy(), y.copy()
    first = run(code, x, y)
    assert bits(first) == bits(f(x, y)) and bits([x, y]) == bits(copies)
    before = bits(first)
    run(code, y, x)
    assert bits(first) == before
    assert not any(np.shares_memory(one, other) for i, one in enumerate(first) for other in first[:i])


# -------------------------------------------------------------------- all together


def program(random: Random, arrays: list[Any]) -> list[Any]:
    """Results of a random program with views, writes of its own, and equal calls."""
    pool = list(arrays)
    for _ in range(random.randint(3, 25)):
        x, y = random.choice(pool), random.choice(pool)
        kind = random.randrange(9)
        if kind == 0 and x.ndim == 2:
            new = x.T
        elif kind == 1 and x.ndim == 2:
            new = x[:, 0:2] if random.random() < 0.5 else x[1]
        elif kind == 2 and x.ndim == y.ndim == 2 and x.shape[1] == y.shape[0]:
            new = x @ y
        elif kind == 3:
            new = np.tanh(x)
        elif kind == 4:
            new = np.negative(x)
            np.exp(new, out=new)
        elif kind == 5 and x.ndim == 2:
            new = np.add.reduce(x, axis=random.randrange(2))
        elif kind == 6:
            new = x.reshape(-1)
        else:
            if x.shape != y.shape:
                y = x[1] if x.ndim == 2 else 0.5
            new = random.choice((np.add, np.multiply, np.subtract))(x, y)
        pool.append(new)
    return pool[-random.randint(1, 4) :]


@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_random_code_keeps_its_bits(start: int) -> None:
    for seed in range(start, start + 100):
        arrays = [drawn(3, 4), drawn(4, 3), drawn(3, 3).copy("F"), drawn(4)]
        code = traced(lambda *arrays, seed=seed: program(Random(seed), list(arrays)), *arrays)
        other = [(array * 1.5).copy(order="K") for array in arrays]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = program(Random(seed), list(other))
            kept = [array.copy() for array in other]
            function = load(optimized(code), SourceFile())
            found = function(*other)
            assert bits(found) == bits(expected), seed
            assert all(map(np.array_equal, other, kept)), seed
            function(*arrays)
            assert bits(found) == bits(expected), seed


def test_every_pass_leaves_its_argument_as_it_is() -> None:
    arrays = [drawn(3, 4), drawn(4, 3), drawn(3, 3), drawn(4)]
    code = traced(lambda *arrays: program(Random(3), list(arrays)), *arrays)
    before = text_of(code, Names())
    for each in PASSES:
        each(code)
        assert text_of(code, Names()) == before


# -------------------------------------------------------------------- what can be traced


def test_errors_are_handled_as_the_function_handles_them() -> None:
    x = np.array([-200.0, 1.0], np.float32)
    code = optimized(traced(lambda x: sigmoid(x) + sigmoid(x * 2), x))
    text = text_of(code, Names())
    regions = [line for line in text.splitlines() if "with errstate(" in line]
    assert len(regions) == 2 and all("over='ignore'" in line for line in regions) and "negative" in text
    with np.errstate(all="raise", under="ignore"):
        run(code, x)
    code = optimized(traced(lambda x: np.exp(x), x))
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        run(code, -x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x[0] > 0 else -x, lambda x: x * float(x[0]), lambda x: x**2, lambda x: np.asarray(x) + 1, lambda x: x.strides,
        lambda x: np.add.at(np.zeros(3), [0, 1, 2], x), lambda x: np.negative(x, out=x), lambda x: np.copyto(x, 1.0),
    ],
)  # fmt: skip
def test_values_memory_and_writes_cannot_be_traced(function: Any) -> None:
    assert_raises(Untraceable, None, lambda: traced(function, np.ones(3, np.float32)))


def test_views_are_not_written_into() -> None:
    def f(x: Any) -> Any:
        new = np.negative(x)
        view = new[0:2]
        np.exp(new, out=new)
        return view

    assert_raises(Untraceable, None, lambda: traced(f, drawn(3)))
