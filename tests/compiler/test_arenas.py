"""Arenas: calls compute in memory that is used again, and nobody sees it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.compiler.arena import MOST_FREE, ArenaPool
from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.compiler.passes.arenas import FEWEST, LARGEST, with_arena
from aiograd.nn import functional as F
from tests.support import assert_awaiting_raises, bits
from tests.support import random_leaf as leaf

F4 = np.dtype(np.float32)
rng = np.random.default_rng(0)


def deep(x: Any, w: Any) -> tuple[Any, Any]:
    """Saves a dozen values; returns one that its backward needs, and a loss."""
    y = x
    for _ in range(6):
        y = ag.tanh(y * w) + x * w
    z = ag.exp(y * 0.1)
    return z, (z * w * z).sum()


def code_of(compiled: Any) -> Any:
    (code,) = compiled._all()
    return code


async def gradients(outputs: Any, x: Any, w: Any, **options: Any) -> list[bytes]:
    return bits(*await ag.grad(outputs[1], [x, w], **options))


async def test_a_thousand_calls_in_flight() -> None:
    f, draws = ag.compile(deep), random.Random(1)
    kept: dict[int, Any] = {}
    done: list[Any] = []
    for n in range(1000):
        x, w = leaf(5, 3), leaf(3)
        outputs = f(x, w)
        expected = deep(x, w)
        kept[n] = (x, w, outputs, bits(*expected), await gradients(expected, x, w))
        while kept and draws.random() < 0.45:
            x, w, outputs, values, grads = kept.pop(draws.choice([*kept]))
            fate = draws.randrange(4)
            if fate:  # else the graph is freed without a pass
                retains = fate == 1
                assert await gradients(outputs, x, w, retain_graph=retains) == grads
                if retains:
                    assert await gradients(outputs, x, w) == grads
            done.append((outputs, values))
    assert all([bits(*outputs) == values for outputs, values in done]) and len(done) > 500
    for x, w, outputs, values, grads in kept.values():
        assert bits(*outputs) == values and await gradients(outputs, x, w) == grads and bits(*outputs) == values
    statistics = f.statistics()
    assert statistics.runs == 999 and statistics.recordings == 1
    kept.clear()
    done.clear()
    del outputs, expected
    gc.collect()
    arena_bytes = f.programs[0].arena_bytes
    assert arena_bytes >= 12 * 60 and f.statistics().arena_bytes == MOST_FREE * arena_bytes


async def test_memory_is_used_again_once_a_graph_is_gone() -> None:
    f, x, w = ag.compile(deep), leaf(5, 3), leaf(3)
    for _ in range(3):
        await gradients(f(x, w), x, w)
    arena_bytes = f.programs[0].arena_bytes
    for _ in range(20):
        await gradients(f(x, w), x, w)
        f(x, w)  # freed without a pass
    assert f.statistics().arena_bytes <= 2 * arena_bytes  # that of the pass which made the backward is not used again
    one, other = f(x, w), f(x, w)
    assert one[1].grad_fn.arena.arrays is not other[1].grad_fn.arena.arrays
    held = one[1].grad_fn.arena.arrays
    del one
    again = f(x, w)
    assert again[1].grad_fn.arena.arrays is held
    f.clear()
    assert f.statistics().arena_bytes == 0 and bits(*again) == bits(*other)


async def test_copies_of_an_operand_before_and_after_an_effect_are_arrays_of_their_own() -> None:
    w, v = leaf(4, 4), leaf(4)

    def function(x: Any) -> Any:
        y = x @ w
        first = x * v + w[3] + ag.randn(4) * v
        second, third = y * v + w[2], y * v + w[1]
        return (first * 2.0).mean() + (second * 3.0).mean() + (third * 4.0).mean()

    compiled = ag.compile(function, tier="numpy")
    found = []
    for run in (function, compiled):
        ag.seed(3)
        numbers = np.random.default_rng(0)
        found.append([bits(run(ag.tensor(numbers.standard_normal((5, 4)).astype(np.float32)))) for _ in range(3)])
    assert found[0] == found[1]
    assert code_of(compiled).program.arena_bytes


async def test_a_retained_graph_keeps_its_arena() -> None:
    f, x, w = ag.compile(deep), leaf(5, 3), leaf(3)
    await gradients(f(x, w), x, w)
    outputs = f(x, w)
    first = await gradients(outputs, x, w, retain_graph=True)
    for _ in range(5):
        others = leaf(5, 3), leaf(3)
        await gradients(f(*others), *others)
    assert await gradients(outputs, x, w) == first
    assert outputs[1].grad_fn.arena is None


async def test_loops_and_threads() -> None:
    f, wrong = ag.compile(deep), []

    async def work(seed: int) -> None:
        numbers = np.random.default_rng(seed)
        for _ in range(60):
            x, w = (ag.tensor(numbers.standard_normal(shape).astype(np.float32), requires_grad=True) for shape in ((5, 3), (3,)))
            outputs, expected = f(x, w), deep(x, w)
            if await gradients(outputs, x, w) != await gradients(expected, x, w) or bits(*outputs) != bits(*expected):
                wrong.append(seed)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and f.statistics().recordings <= 4


async def test_a_gradient_that_may_be_a_part_of_a_saved_value() -> None:
    """The rule of cross entropy is one call, of which nothing is known: its result goes on to the leaf as it is."""
    target = rng.integers(0, 128, 64)
    f = ag.compile(lambda x, w: F.cross_entropy(x + w, target) * 2.0)
    for _ in range(3):
        x, w = leaf(64, 128), leaf(64, 128)
        loss = f(x, w)
        found = await ag.grad(loss, [x, w])
        assert bits(*found) == bits(*await ag.grad(F.cross_entropy(x + w, target) * 2.0, [x, w]))
    code = code_of(f)
    assert code.sharing and code.inside
    assert not code.forward[1]._free, "memory that a gradient may be a part of is not used again"


async def test_a_failed_pass_gives_the_arena_back() -> None:
    f, x, w = ag.compile(deep), leaf(5, 3), leaf(3)
    for _ in range(2):
        await gradients(f(x, w), x, w)

    def fails(grad: Any) -> None:
        raise ValueError("no")

    handle = x.register_hook(fails)
    outputs = f(x, w)
    await assert_awaiting_raises(ValueError, "no", outputs[1].backward())
    assert outputs[1].grad_fn.arena is None
    handle.remove()
    assert await gradients(f(x, w), x, w) == await gradients(deep(x, w), x, w)


async def test_a_thread_that_goes_on_after_its_pass_keeps_the_arena() -> None:
    f, x, w = ag.compile(lambda x, w: deep(x, w)[1]), leaf(5, 3), leaf(3)
    for _ in range(3):
        await f(x, w).backward()
    code = code_of(f)
    ((strides, backward),) = code.whole.items()
    reached, may_go_on = threading.Event(), threading.Event()
    found: list[Any] = []

    def waits(saved: Any, grads: Any) -> Any:
        reached.set()
        may_go_on.wait()
        found.extend([array.tobytes() for array in saved])
        return backward(saved, grads)

    loss = f(x, w)
    node, arrays = loss.grad_fn, loss.grad_fn.arena.arrays
    expected = [array.tobytes() for array in node._arrays]
    code.whole[strides] = waits
    thread = threading.Thread(target=node.vjp, args=([np.ones((), np.float32)],))
    thread.start()
    reached.wait()
    code.whole[strides] = backward
    node.release_variables()  # as a pass does that was cancelled meanwhile
    del node
    for _ in range(5):
        other = f(leaf(5, 3), leaf(3))
        assert other.grad_fn.arena.arrays is not arrays
    may_go_on.set()
    thread.join()
    assert found == expected
    del thread
    others = [f(x, w) for _ in range(3)]
    assert any([other.grad_fn.arena.arrays is arrays for other in others])


# -------------------------------------------------------------------- the pass


def row(shape: tuple[int, ...], name: str) -> Ref:
    return Ref(name, shape, F4, np.empty(shape, F4).strides)


def test_the_pass_gives_memory_to_new_arrays_that_nobody_else_sees() -> None:
    shape = (4, 4)
    given = row(shape, "x")
    made = [row(shape, f"v{n}") for n in range(FEWEST + 2)]
    view, total, large = row((4, 4), "t"), row((), "s"), row((LARGEST,), "l")
    calls = [Call(Form.CALL, np.multiply, "multiply", (given, given), (ref,), fresh=True) for ref in made]
    calls.append(Call(Form.ATTRIBUTE, "T", "T", (made[1],), (view,)))
    calls.append(Call(Form.CALL, np.add.reduce, "add_reduce", (made[2], None), (total,), fresh=True))
    calls.append(Call(Form.CALL, np.exp, "exp", (large,), (large,), fresh=True))
    code = ArrayCode("forward", (given,), tuple(calls), ((made[0], view), (made[3],)), frozenset([made[3]]))
    found = with_arena(code)
    by_result = {call.results[0]: call for call in found.calls}
    assert by_result[made[0]].out is None and by_result[made[1]].out is None, "a result, and one that a result is a view of"
    assert all(by_result[ref].out in found.arena for ref in made[2:]) and by_result[total].out is None and by_result[large].out is None
    assert len(found.arena) == FEWEST and len({id(ref) for ref in found.arena}) == FEWEST


def test_few_arrays_are_not_worth_it() -> None:
    given, made = row((4,), "x"), row((4,), "v")
    code = ArrayCode("forward", (given,), (Call(Form.CALL, np.exp, "exp", (given,), (made,), fresh=True),), ((), (made,)), frozenset([made]))
    assert with_arena(code) is code


def test_a_pool_is_bounded() -> None:
    pool = ArenaPool([row((1 << 20,), "m0")])
    arenas = [pool.take() for _ in range(10)]
    assert pool.nbytes == 10 << 22
    del arenas
    assert pool.nbytes == 4 << 22 == 1 << 24
    assert ArenaPool([]).take() is None
