"""`ag.compile`: when it records, when it runs, what it refuses, and that its passes are like any other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
import traceback
import warnings
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, ModifiedError, ShapeError, TraceError
from tests.support import assert_awaiting_raises, assert_raises, bits
from tests.support import random_leaf as leaf

rng = np.random.default_rng(5)


async def same(function: Any, compiled: Any, inputs: list[Any], leaves: list[Any]) -> None:
    """One call and backward of each: equal bits of the result and of the gradients of `leaves`."""
    found = []
    for call in (function, compiled):
        for x in leaves:
            x.grad = None
        loss = call(*inputs)
        await loss.backward()
        found.append(bits(loss, *(x.grad for x in leaves)))
    assert found[0] == found[1]


async def test_the_first_call_records_and_later_ones_run_the_program() -> None:
    w, calls = leaf(3, 3), []

    def f(x: Any) -> Any:
        calls.append(1)
        return (ag.tanh(x @ w) ** 2).sum()

    compiled = ag.compile(f)
    for _ in range(5):
        x = leaf(4, 3)
        await same(f, compiled, [x], [x, w])
    assert len(calls) == 6, "five eager calls and one that was recorded"
    statistics = compiled.statistics()
    assert (statistics.signatures, statistics.recordings, statistics.runs) == (1, 1, 4) and statistics.recording_seconds > 0
    compiled.clear()
    assert compiled.programs == () and compiled.statistics().runs == 4


async def test_arrays_are_tensors_where_a_function_runs_eagerly_too() -> None:
    def f(x: Any, *, pair: Any = ()) -> Any:
        total = x.relu() + sum(each.relu() for each in pair)
        return total * 2.0 if float(total.sum()) > -1.0 else total

    async def wait(x: Any) -> Any:
        return f(x)

    compiled, waiting = ag.compile(f, on_break="eager"), ag.compile(wait, on_break="eager")
    array, inner = np.array([1.0, -2.0]), ag.compile(lambda x: x.relu())
    outer = ag.compile(lambda x: inner(array) * x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the compiled function")
        for _ in range(3):
            assert compiled(array, pair=(array, array)).numpy().tolist() == [6.0, 0.0]
            assert (await waiting(array)).numpy().tolist() == [2.0, 0.0]
    assert compiled.statistics().eager == 2, "after the recorded call"
    assert outer(array).numpy().tolist() == outer(array).numpy().tolist() == [1.0, 0.0]
    with ag.detect_anomaly():
        assert inner(array).numpy().tolist() == [1.0, 0.0]


async def test_captured_tensors_are_read_at_every_run() -> None:
    w, c = leaf(3), leaf(3, grad=False)
    compiled = ag.compile(f := lambda x: (x * w + c).sum())
    x = leaf(3)
    for _ in range(3):
        await same(f, compiled, [x], [x, w])
        with ag.no_grad():
            w *= 1.5
            c += 1.0
    assert compiled.statistics().recordings == 1


async def test_a_tensor_that_was_replaced_is_never_read_again() -> None:
    w = leaf(3)

    def f(x: Any) -> Any:
        return (x * w).sum()

    compiled = ag.compile(f)
    x = leaf(3)
    await same(f, compiled, [x], [x, w])
    w = leaf(3)
    await same(f, compiled, [x], [x, w])
    model = nn.Linear(3, 2)
    program = ag.compile(model)
    before = bits(program(x))
    model.bias = nn.Parameter(model.bias.detach() + 1)
    assert bits(program(x)) == bits(model(x)) != before


async def test_a_tensor_that_was_replaced_is_noticed_wherever_a_name_leads_to_it() -> None:
    class Holder:
        def __init__(self) -> None:
            self.w, self.deep = leaf(3), {"list": [leaf(3)]}

    holder, table, pair, layer = Holder(), {"w": leaf(3)}, [leaf(3), leaf(3)], nn.Linear(3, 3)
    inner = lambda x: x * table["w"]  # noqa: E731

    def f(x: Any) -> Any:
        x = inner(x) * holder.w + holder.deep["list"][0] * pair[1]
        return nn.functional.linear(x, layer.weight, layer.bias)  # the layer itself is not called

    compiled, x = ag.compile(f), leaf(2, 3)

    def replace(n: int) -> None:
        match n:
            case 0:
                holder.w = leaf(3)
            case 1:
                holder.deep["list"][0] = leaf(3)
            case 2:
                table["w"] = leaf(3)
            case 3:
                pair[1] = leaf(3)
            case 4:
                layer.weight = nn.Parameter(leaf(3, 3))

    for n in range(5):
        for _ in range(2):
            assert bits(compiled(x)) == bits(f(x)), n
        before = bits(f(x))
        replace(n)
        assert bits(compiled(x)) == bits(f(x)) != before, n
    assert compiled.statistics().signatures == 1 and compiled.statistics().recordings == 6


CHANGES = ("shape", "dtype", "requires_grad", "number", "keyword", "structure", "no_grad", "training", "default_dtype", "strides")


@pytest.mark.parametrize("change", CHANGES)
async def test_each_guard(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    @ag.compile
    def f(x: Any, n: int = 2, *, pair: Any = None) -> Any:
        y = model(x) * n
        return y if pair is None else y + pair[0] * (pair[1] if len(pair) > 1 else 1.0)

    def eager(*args: Any, **kwargs: Any) -> Any:
        return f.function(*args, **kwargs)

    x = leaf(4, 4)
    f(x)
    assert bits(f(x)) == bits(eager(x)) and f.statistics().recordings == 1
    args: tuple[Any, ...] = (x,)
    kwargs: dict[str, Any] = {}
    match change:
        case "shape":
            args = (leaf(5, 4),)
        case "dtype":
            model.to(np.float64)
            args = (leaf(4, 4, dtype=np.float64),)
        case "requires_grad":
            args = (x.detach(),)
        case "number":
            args = (x, 3)
        case "keyword":
            kwargs = {"pair": (x,)}
        case "structure":
            kwargs = {"pair": (x, 2.0)}
        case "training":
            model.eval()
        case "strides":
            args = (x.T.detach().clone().T,)
    with ag.no_grad() if change == "no_grad" else ag.enable_grad():
        if change == "default_dtype":
            ag.set_default_dtype(np.float64)
            try:
                assert bits(f(*args, **kwargs)) == bits(eager(*args, **kwargs))
            finally:
                ag.set_default_dtype(np.float32)
        else:
            assert bits(f(*args, **kwargs)) == bits(eager(*args, **kwargs))
            assert f(*args, **kwargs).requires_grad is eager(*args, **kwargs).requires_grad
    assert f.statistics().recordings == 2


async def test_reading_a_value_is_an_error_that_names_the_line() -> None:
    def branch(x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x

    for read in (branch, lambda x: x * x.sum().item(), lambda x: x * float(np.asarray(x.detach())[0]), lambda x: x * x.detach().numpy()):
        with pytest.raises(TraceError, match=r"test_compile.py:\d+: .* reads the value of a tensor .* on_break='eager'"):
            ag.compile(read)(leaf(3))
    assert_raises(TraceError, r"if x.sum\(\) > 0", lambda: ag.compile(branch)(leaf(3)))
    eager = ag.compile(branch, on_break="eager")
    with pytest.warns(UserWarning, match=r"branch runs eagerly for float32\[3\]: test_compile.py:\d+ reads the value") as caught:
        for sign in (1, -1, 1):
            x = ag.asarray(np.full(3, sign, np.float32))
            assert bits(eager(x)) == bits(ag.abs(x))
    statistics = eager.statistics()
    assert len(caught) == 1 and statistics.breaks == 1 and statistics.signatures == 0 and statistics.recordings == 1 and statistics.eager == 2
    assert "reads the value" in statistics.reasons["float32[3]"]


async def test_a_refusal_that_the_function_catches_is_raised_at_its_end() -> None:
    @ag.compile
    def f(x: Any) -> Any:
        with contextlib.suppress(Exception):
            if x.sum() > 0:
                return x * 2
        return x * 5

    for _ in range(2):
        assert_raises(TraceError, r"if x.sum\(\) > 0", lambda: f(ag.ones(3)))
    assert f.statistics().signatures == 0


async def test_a_line_without_text_is_named_by_its_place() -> None:
    names: dict[str, Any] = {}
    exec("def f(x):\n    return x * float(x.sum())", names)  # noqa: S102 - a function whose text nobody has
    assert_raises(TraceError, r"^<string>:2 reads the value", lambda: ag.compile(names["f"])(ag.ones(3)))


async def test_what_a_program_cannot_repeat_runs_eagerly_with_the_right_result() -> None:
    def writes(x: Any) -> Any:
        x += 1
        return x * 1

    def overwrites(x: Any) -> Any:
        y = ag.exp(x)
        y += 1
        return y

    def hooks(x: Any) -> Any:
        y = x * 1
        y.register_hook(lambda g: g * 3)
        return y * 1

    for function, reason in (
        (writes, "modifies an argument in place"),
        (overwrites, "that its backward needs"),
        (hooks, "registers a hook"),
        (lambda x: x * ag.tensor(x.detach()), "copies a tensor"),
        (lambda x: (lambda y: (y, y.detach()))(x * 2), "returns one tensor twice"),
    ):
        compiled = ag.compile(function)
        for _ in range(3):
            x = leaf(2, 2, grad=function is not writes)
            ag.seed(1)
            expected = function(x.clone() if function is writes else x)
            ag.seed(1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = compiled(x)
            pair = ([expected], [found]) if isinstance(expected, ag.Tensor) else (expected, found)
            assert bits(*pair[0]) == bits(*pair[1])
        assert compiled.statistics().runs == 0 and reason in str(compiled.statistics().reasons), compiled.statistics()


async def test_more_signatures_than_wanted_drop_the_least_used_and_warn_once() -> None:
    compiled = ag.compile(lambda x: x * 2, max_signatures=3)
    with pytest.warns(UserWarning, match=r"more than 3 signatures .* float32\[0\].*; float32\[3\]"):
        for n in range(4):
            compiled(leaf(n))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(leaf(5))
    assert compiled.statistics().signatures == 3


async def test_a_function_for_many_sizes_keeps_a_program_for_each() -> None:
    compiled = ag.compile(lambda x: x * 2, max_signatures=1, dynamic=True)
    for _ in range(2):
        for n in range(64):
            compiled(leaf(n))
    assert compiled.statistics().recordings == compiled.statistics().signatures == compiled.statistics().runs == 64
    with pytest.warns(UserWarning, match="more than 64 signatures"):
        compiled(leaf(64))
    assert compiled.statistics().signatures == 64


async def test_bad_input() -> None:
    for wrong in ({"on_break": "ignore"}, {"max_signatures": 0}):
        with pytest.raises(ArgumentError, match="expected"):
            ag.compile(lambda x: x, **wrong)

    def generator(x: Any) -> Any:
        yield x

    assert_raises(ArgumentTypeError, r"test_compile.py:\d+: compile\(\): generator is a generator function; expected", ag.compile, generator)
    assert_raises(ArgumentTypeError, "expected", ag.compile, 3)
    with pytest.raises(ArgumentTypeError, match=r"test_compile.py:\d+: `same\(\{1\}\)`: a compiled function was called with a set"):
        same = ag.compile(lambda x: x)
        same({1})
    for result in ([], 3, object(), (leaf(2) * 2, "text")):
        with pytest.raises(TraceError, match=r"test_compile.py:\d+: .* returned"):
            ag.compile(lambda x, result=result: result)(leaf(2))

    def forever(x: Any) -> Any:
        return endless(x) + 1

    endless = ag.compile(forever)
    for on_break in ("raise", "eager"):
        endless = ag.compile(forever, on_break=on_break)
        with pytest.raises(TraceError, match=r"test_compile.py:\d+: `return endless\(x\) \+ 1` calls without end while"):
            endless(leaf(2))
    compiled = ag.compile(lambda x, y: x @ y)
    assert_raises(ShapeError, None, lambda: compiled(leaf(2, 3), leaf(2, 3)))
    assert compiled.statistics().signatures == 0


async def test_arguments_that_are_one_tensor() -> None:
    compiled = ag.compile(f := lambda x, y: (x * y + ag.exp(y) * 2).sum())
    x, y = leaf(3), leaf(3)
    for inputs in ([x, x], [x, y], [y, y], [y, x], [x, x], [x, x.detach()]):
        await same(f, compiled, inputs, [x, y])
    assert compiled.statistics().recordings == 3 and compiled.statistics().breaks == 0


async def test_structures_go_in_and_come_out() -> None:
    def f(batch: dict[str, Any], scale: float) -> dict[str, Any]:
        return {"sum": batch["x"] + batch["y"][0], "rest": [batch["x"] * scale, None, (batch["y"][1] * 2,)]}

    compiled = ag.compile(f)
    for _ in range(3):
        batch = {"x": leaf(2), "y": [leaf(2), np.arange(2.0)]}
        found = compiled(batch, 2.0)
        batch["y"][1] = ag.asarray(batch["y"][1])
        result = f(batch, 2.0)
        assert found.keys() == result.keys() and found["rest"][1] is None
        assert bits(found["sum"], found["rest"][0], found["rest"][2][0]) == bits(result["sum"], result["rest"][0], result["rest"][2][0])


# -------------------------------------------------------------------- effects


async def test_random_numbers_are_drawn_anew_at_every_run_from_the_generator_of_the_call() -> None:
    own = ag.random.Generator(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 4))
    kinds = ("normal", "uniform", "bernoulli", "dropout_mask")

    def f(x: Any) -> Any:
        default = ag.random.default_generator()
        x = model(x) + own.normal(x.shape) + x * default.bernoulli(0.5, x.shape) + default.uniform(x.shape)
        return x[default.permutation(4)] * default.dropout_mask(x.shape, 0.3) + default.integers(0, 5, x.shape)

    compiled = ag.compile(f)
    x, results = leaf(4, 4), []
    for call in (f, compiled):
        own.load_state_dict(ag.random.Generator(3).state_dict())
        ag.seed(11)
        found = []
        for step in range(4):
            if step == 2:
                ag.seed(12)
            x.grad = None
            y = call(x)
            await (y**2).sum().backward()
            found.append(bits(y, x.grad))
        results.append(found)
    assert results[0] == results[1] and results[0][0] != results[0][1]
    statistics = compiled.statistics()
    assert statistics.recordings == 1 and statistics.runs == 3 and not statistics.breaks
    names = [statement.op.name for statement in compiled.programs[0].statements if not statement.is_row]
    assert sorted({*names}) == sorted({*kinds, "permutation", "integers"}) and "permutation" in str(compiled.programs[0])


async def test_second_derivatives_of_a_dropped_out_function_use_the_mask_of_its_call() -> None:
    compiled = ag.compile(f := lambda x: (nn.functional.dropout(x, 0.5, True) ** 3).sum())
    x, results = leaf(64, dtype=np.float64), []
    for call in (f, compiled):
        ag.seed(5)
        found = []
        for _ in range(3):
            (g,) = await ag.grad(call(x), [x], create_graph=True)
            found.append(bits(g, *await ag.grad(g.sum(), [x])))
        results.append(found)
    assert results[0] == results[1]


async def test_running_statistics_move_once_per_call() -> None:
    model, twin = (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    compiled = ag.compile(model)
    for training in (True, False, True):
        model.train(training)
        twin.train(training)
        for _ in range(5):
            x = leaf(6, 3)
            ours, theirs = compiled(x), twin(x)
            await asyncio.gather((ours**2).sum().backward(), (theirs**2).sum().backward())
            assert bits(ours) == bits(theirs)
            assert bits(*model.buffers()) == bits(*twin.buffers())
            assert bits(*(p.grad for p in model.parameters())) == bits(*(p.grad for p in twin.parameters()))
    assert compiled.statistics().recordings == 2 and not compiled.statistics().breaks


# -------------------------------------------------------------------- passes


async def test_the_order_of_sums_is_that_of_the_eager_pass_with_uses_outside() -> None:
    w = leaf(16)

    def f(x: Any) -> Any:
        return ag.exp(x * w) + w * w

    compiled = ag.compile(f)
    for _ in range(4):
        x = leaf(16)
        found = []
        for call in (f, compiled):
            w.grad = None
            before = w * 0.3
            loss = (call(x) * before).sum() + (w * 0.7).sum() + call(x).sum()
            await loss.backward()
            found.append(bits(loss, w.grad))
        assert found[0] == found[1]


async def test_outputs_may_be_differentiated_separately_and_partly() -> None:
    def f(x: Any, y: Any) -> tuple[Any, Any, Any]:
        h = x * y
        return ag.sin(h), h * y, ag.topk(h, 2)[0]

    compiled = ag.compile(f)
    x, y = leaf(5), leaf(5)
    for _ in range(3):
        for which in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
            for inputs in ([x], [y], [x, y]):
                found = []
                for call in (f, compiled):
                    outputs = call(x, y)
                    found.append(bits(*await ag.grad([outputs[i].sum() for i in which], inputs)))
                assert found[0] == found[1], (which, inputs)


async def test_retained_graphs_second_passes_and_freed_graphs() -> None:
    x = leaf(4)
    compiled = ag.compile(lambda x: ag.exp(x).sum())
    compiled(x)
    loss = compiled(x)
    await loss.backward(retain_graph=True)
    first = bits(x.grad)
    x.grad = None
    await loss.backward()
    assert bits(x.grad) == first
    await assert_awaiting_raises(GraphFreedError, "second time", loss.backward())


async def test_a_change_of_what_was_saved_is_noticed() -> None:
    w, x = leaf(3), leaf(3)
    compiled = ag.compile(lambda x: (x * w, ag.exp(x)))
    compiled(x)
    product, _ = compiled(x)
    with ag.no_grad():
        w += 1
    await assert_awaiting_raises(ModifiedError, None, product.sum().backward())
    _, exponential = compiled(x)
    exponential.detach().__iadd__(1)
    await assert_awaiting_raises(ModifiedError, None, exponential.sum().backward())


async def test_second_derivatives_have_the_bits_of_the_eager_ones() -> None:
    w = leaf(3, 3, dtype=np.float64)

    def f(x: Any) -> Any:
        return (ag.tanh(x @ w) * ag.sin(x)).sum()

    compiled = ag.compile(f)
    for _ in range(3):
        x = leaf(2, 3, dtype=np.float64)
        found = []
        for call in (f, compiled):
            w.grad = x.grad = None
            (gx,) = await ag.grad(call(x), [x], create_graph=True)
            await (gx**2).sum().backward()
            found.append(bits(gx, x.grad, w.grad))
        assert found[0] == found[1]
    assert await ag.gradcheck(compiled, (x,)) and await ag.gradgradcheck(compiled, (x,))


async def test_hooks_and_retained_gradients_of_leaves_and_outputs() -> None:
    x, seen = leaf(3), []
    compiled = ag.compile(lambda x: x * x)
    compiled(x)
    x.register_hook(lambda g: seen.append("leaf"))
    y = compiled(x)
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    await y.sum().backward()
    assert seen == ["leaf"] and y.grad.tolist() == [2.0] * 3 and np.allclose(x.grad.numpy(), 4 * x.detach().numpy())


async def test_modes_that_watch_operations_run_the_function_itself() -> None:
    w = leaf(3)
    compiled = ag.compile(f := lambda x: (ag.exp(x) * w).sum())
    x = leaf(3)
    compiled(x)
    runs = compiled.statistics().runs
    with ag.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        await same(f, compiled, [x], [x, w])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ag.detect_anomaly():
            await same(f, compiled, [x], [x, w])
    assert compiled.statistics().runs == runs
    y = ag.compile(lambda x: compiled(x) * 2)
    for _ in range(2):
        await same(lambda x: f(x) * 2, y, [x], [x, w])
    assert y.statistics().signatures == 1


async def test_a_thousand_calls_in_flight_with_random_frees() -> None:
    w = leaf(8)
    compiled = ag.compile(f := lambda x: (ag.tanh(x * w) * x).sum())
    inputs = [leaf(8) for _ in range(1000)]
    compiled(inputs[0])
    losses = [compiled(x) for x in inputs]
    for i in rng.permutation(1000)[:300]:
        losses[i] = None
    gc.collect()
    await asyncio.gather(*(loss.backward() for loss in losses if loss is not None))
    for x, loss in zip(inputs, losses, strict=True):
        if loss is None:
            assert x.grad is None
            continue
        (expected,) = await ag.grad(f(x), [x])
        assert bits(x.grad) == bits(expected)


async def test_calls_from_threads() -> None:
    w = leaf(8)
    compiled = ag.compile(f := lambda x: (ag.tanh(x * w) * x).sum())
    inputs = [leaf(8) for _ in range(40)]
    losses = await asyncio.gather(*(asyncio.to_thread(compiled, x) for x in inputs))
    for x, loss in zip(inputs, losses, strict=True):
        assert bits(loss) == bits(f(x))


# -------------------------------------------------------------------- modules, methods, text


async def test_modules_methods_and_training_steps() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    labels = np.array([0, 3, 1, 2, 2])
    twin = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    twin.load_state_dict(model.state_dict())
    compiled = ag.compile(lambda x, labels: nn.functional.cross_entropy(model(x), labels))
    ours, theirs = ag.optim.Adam(model.parameters(), lr=0.05), ag.optim.Adam(twin.parameters(), lr=0.05)
    for _ in range(100):
        x, labels = leaf(5, 6, grad=False), rng.integers(0, 4, 5)
        ours.zero_grad()
        theirs.zero_grad()
        loss, expected = compiled(x, labels), nn.functional.cross_entropy(twin(x), labels)
        await asyncio.gather(loss.backward(), expected.backward())
        ours.step()
        theirs.step()
        assert bits(loss) == bits(expected)
    assert bits(*model.parameters()) == bits(*twin.parameters()) and compiled.statistics().recordings == 1

    class Scaler:
        def __init__(self) -> None:
            self.by = leaf(3)

        @ag.compile
        def scale(self, x: Any) -> Any:
            return x * self.by

    scaler = Scaler()
    for _ in range(2):
        x = leaf(3)
        assert bits(scaler.scale(x)) == bits(x * scaler.by)
    scaler.by = leaf(3)
    assert bits(scaler.scale(x)) == bits(x * scaler.by)


async def test_a_captured_tensor_that_is_laid_out_otherwise_is_recorded_again() -> None:
    w = leaf(3, 4)
    compiled = ag.compile(f := lambda x: ag.tanh(x @ w))
    for layout in (np.ascontiguousarray, np.ascontiguousarray, np.asfortranarray, np.asfortranarray):
        w._data = layout(w._data)
        x = leaf(2, 3)
        assert bits(compiled(x)) == bits(f(x))
    assert compiled.statistics().recordings == 2


async def test_the_program_can_be_read() -> None:
    w = leaf(2, 2)

    @ag.compile(tier="numpy")
    def layer(x: Any) -> Any:
        return ag.tanh(x @ w)  # the line

    await layer(leaf(3, 2)).sum().backward()
    await layer(leaf(3, 2)).sum().backward()
    (program,) = layer.programs
    assert program.signature == "float32[3, 2] requires grad" and [each.op.name for each in program.statements] == ["matmul", "tanh"]
    assert "v1 = tanh(v0)  # test_compile.py" in program.source and "the line" in program.source and "def backward(saved, grads):" in program.source
    assert "matmul" in str(program) and "24" in str(program)
    (name,) = {layer._all()[0].forward[0].__code__.co_filename, *(each.__code__.co_filename for each in layer._all()[0].backwards.values())}
    assert "".join(linecache.getlines(name)) == program.source
    dot, svg = program.dot(), program.svg()
    assert dot.startswith("digraph program {") and dot.count("->") == 4 and 'label="tanh' in dot
    assert svg.startswith("<svg") and "<title>Program: 5 nodes</title>" in svg and ">3×2 float32<" in svg
    assert_raises(ArgumentError, r"program.svg\(\): the program has 5 boxes", program.svg, max_nodes=4)
    assert layer.__name__ == "layer" and layer(leaf(3, 2)).grad_fn.name == "layerBackward"
    with np.errstate(all="raise"):
        with pytest.raises(FloatingPointError) as caught:
            log = ag.compile(lambda x: ag.log(x))
            log(ag.asarray([1.0]))
            log(ag.asarray([0.0]))
    text = "".join(traceback.format_exception(caught.value))
    assert "v0 = log(i0)" in text and "statement `v0 = log(i0)" in text and any(name.startswith("<aiograd program") for name in linecache.cache)


def test_zeros_of_either_sign_are_different_numbers() -> None:
    scale = 0.0

    @ag.compile
    def scaled(x: ag.Tensor, factor: float) -> ag.Tensor:
        return (x * factor) * 1.0 + x * scale

    x = ag.tensor([2.0, 3.0])
    for factor, scale in ((0.0, 0.0), (-0.0, -0.0), (0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (0.0, 0.0)) * 2:
        expected = (x * factor) * 1.0 + x * scale
        assert np.signbit(scaled(x, factor).numpy()).tolist() == np.signbit(expected.numpy()).tolist()


INNER = ag.compile(lambda x: x * 2)


@ag.compile
def detach(x: Any) -> Any:
    """Calls another compiled function, and has the name of an attribute that it uses."""
    return INNER(x) * x.detach()


def test_counters_of_compiled_functions_are_no_numbers_that_count() -> None:
    for n in range(5):
        detach(leaf(2))
        INNER(leaf(n + 1))
    assert detach.statistics().recordings == 1 and INNER.statistics().recordings == 5
