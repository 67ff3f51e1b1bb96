"""A backward pass step by step: what the record says is what a backward does, and the pass leaves everything as it was."""

from __future__ import annotations

import asyncio
import re
import traceback
import weakref
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.engine.input_buffer import FOLD_INLINE_BYTES
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError, NoGraphError, ShapeError
from tests.distributed.workers import workers
from tests.support import assert_awaiting_raises, cancel, custom_function, draw, reference_counts_only, same
from tests.toy_device import ToyDevice

HOSTILE = "<b>x</b><script>alert(1)</script>"

service = dist.Service()


@service.function
def squared(x: ag.Tensor) -> ag.Tensor:
    """The square of a number."""
    return x * x


def leaf(*shape: int, at: int = 0) -> ag.Tensor:
    return ag.tensor(draw(*shape, at=at), dtype=np.float64, requires_grad=True)


def random_graph(seed: int) -> tuple[ag.Tensor, dict[str, ag.Tensor]]:
    random = Random(seed)
    params = {f"p{i}": leaf(2, 3, at=i) for i in range(3)}
    made: list[Any] = list(params.values())
    for _ in range(9):
        one, other = random.choices(made, k=2)
        made.append(random.choice([one * other, (one + other).tanh(), one - other * 0.5, one[:1] + other]))
    return sum(each.sum() for each in made[3:]), params


# -------------------------------------------------------------------- what a backward does


@pytest.mark.parametrize("seed", range(8))
async def test_order_sums_and_gradients_are_those_of_a_backward(seed: int) -> None:
    loss, params = random_graph(seed)
    order = ag.GraphTask([(loss.grad_fn, 0)], [np.float64(1.0)]).execution_order()
    steps = await ag.viz.step(loss, params=params)
    assert [(step.node, step.sequence_nr) for step in steps] == [(node.name, node.sequence_nr) for node in order]
    assert [step.number for step in steps] == list(range(1, len(order) + 1))
    assert all(param.grad is None for param in params.values())
    await loss.backward()
    accumulated = {step.title: step.accumulated.values for step in steps if step.accumulated is not None}
    assert accumulated.keys() == {name for name, param in params.items() if param.grad is not None}
    for name, grad in accumulated.items():
        same(params[name].grad, grad)

    arrived: dict[int, int] = {1: 1}
    for step in steps:
        assert step.expected == arrived[step.number], "everything has arrived before a node runs"
        for each in step.contributions:
            assert each.target_step is not None
            arrived[each.target_step] = arrived.get(each.target_step, 0) + 1
            assert each.arrived == arrived[each.target_step] and each.expected == steps[each.target_step - 1].expected
            if each.arrived == each.expected:
                np.testing.assert_array_equal(each.total.values, steps[each.target_step - 1].inputs[0].values)
        following = steps[step.number].title if step.number < len(steps) else None
        assert (step.ready[0] if step.ready else None) == following


async def test_sums_are_recorded_as_they_were_at_each_step() -> None:
    x = leaf(3)
    steps = await ag.viz.step((x * 2).sum() + (x * 3).sum() + (x * 4).sum(), params={"x": x})
    sent = [each for step in steps for each in step.contributions if each.target == "x"]
    assert [(each.arrived, each.expected) for each in sent] == [(1, 3), (2, 3), (3, 3)]
    assert [each.gradient.values[0] for each in sent] == [4, 3, 2] and [each.total.values[0] for each in sent] == [4, 7, 9]
    assert not sent[0].total.values.flags.writeable and steps.seed.values == 1


async def test_gradients_of_parts_are_written_out() -> None:
    @custom_function()
    def broken(ctx: Any, g: Any) -> Any:
        raise ValueError

    x = leaf(8)
    steps = await ag.viz.step(broken.apply(x).sum() + x[0] * 2 + x[7], params={"x": x})
    sent = [each for step in steps for each in step.contributions if each.target == "x"]
    assert [each.gradient.values.tolist() for each in sent] == [[0] * 7 + [1], [2] + [0] * 7]
    assert [each.total.values.tolist() for each in sent] == [[0] * 7 + [1], [2] + [0] * 6 + [1]]


async def test_nothing_is_changed() -> None:
    x, called = leaf(3), []
    x.grad = ag.tensor([1.0, 2.0, 3.0], dtype=np.float64)
    x.register_post_accumulate_grad_hook(called.append)
    x.register_post_accumulate_grad_hook(called.append, eager=True)
    y = x * 2
    y.retain_grad()
    before = x.grad
    steps = await ag.viz.step(y.sum())
    assert x.grad is before and x.grad.tolist() == [1, 2, 3] and y.grad is None and called == []
    assert steps[-1].accumulated.values.tolist() == [2, 2, 2], "what a backward adds"
    await y.sum().backward()
    assert x.grad.tolist() == [3, 4, 5] and y.grad.tolist() == [1, 1, 1]


async def test_large_gradients_are_recorded_as_numbers() -> None:
    x = ag.tensor(draw(FOLD_INLINE_BYTES // 8 + 1), dtype=np.float64, requires_grad=True)
    loss = (x * x).sum()
    steps = await ag.viz.step(loss)
    await loss.backward()
    grad = steps[-1].accumulated
    assert grad.values is None and grad.shape == x.shape and grad.dtype == np.float64 and grad.device == "cpu"
    expected = x.grad.numpy()
    assert (grad.norm, grad.low, grad.high) == (np.linalg.norm(expected), expected.min(), expected.max())
    assert [each.total.norm for each in steps[1].contributions] == [grad.norm / 2, grad.norm], "sums that are made on the executor elsewhere"
    assert (await ag.viz.step((x * x).sum(), max_elements=x.size))[-1].accumulated.values.size == x.size


async def test_hooks_run_and_are_named() -> None:
    x = leaf(2)

    def doubled(grad: Any) -> Any:
        return grad * 2

    x.register_hook(doubled)
    steps = await ag.viz.step((x * 3).sum(), params={"x": x})
    assert steps[-1].hooks == (doubled.__qualname__,)
    assert steps[-1].inputs[0].values.tolist() == [3, 3] and steps[-1].accumulated.values.tolist() == [6, 6]


async def test_rules_that_wait_run_one_after_the_other() -> None:
    order = []

    def waiting(name: str) -> Any:
        @custom_function()
        async def rule(ctx: Any, g: Any) -> Any:
            order.append(f"{name} begins")
            for _ in range(9):
                await asyncio.sleep(0)
            order.append(f"{name} ends")
            return g

        return rule

    x = leaf(2)
    steps = await ag.viz.step((waiting("first").apply(x) + waiting("second").apply(x)).sum())
    assert order == ["second begins", "second ends", "first begins", "first ends"]
    assert [step.title for step in steps][2:] == ["ruleBackward", "ruleBackward", "leaf"]
    assert re.fullmatch(r"tests/test_stepping\.py:\d+", steps[2].place) and "waiting(" in steps[2].code


async def test_lines_of_code_are_known_under_anomaly_detection() -> None:
    x = leaf(2)
    with ag.detect_anomaly():
        loss = (x * x).sum()
    steps = await ag.viz.step(loss)
    assert {step.code for step in steps[:-1]} == {"loss = (x * x).sum()"} and steps[-1].place == ""
    assert (await ag.viz.step((x * x).sum()))[0].place == ""


async def test_second_derivatives() -> None:
    x = leaf(3)
    (slope,) = await ag.grad((x**3).sum(), [x], create_graph=True)
    steps = await ag.viz.step(slope.sum(), params={"x": x})
    np.testing.assert_allclose(steps[-1].accumulated.values, 6 * x.numpy())


async def test_several_inputs_of_a_node() -> None:
    x = leaf(4)
    low, high = ag.split(x, 2)
    steps = await ag.viz.step((low * 2).sum() + high.sum(), ag.tensor(10.0, dtype=np.float64))
    assert steps.seed.values == 10 and steps[-1].accumulated.values.tolist() == [20, 20, 10, 10]
    assert "input 1" in str(steps)


@pytest.mark.parametrize("expanded", [False, True])
async def test_compiled_functions(expanded: bool) -> None:
    compiled = ag.compile(lambda x: (x.tanh() * x).sum())
    x = leaf(3)
    for _ in range(3):
        loss = compiled(x)
    if expanded:
        with ag.detect_anomaly():
            steps = await ag.viz.step(loss, params={"x": x})
    else:
        steps = await ag.viz.step(loss, params={"x": x})
    assert len(steps) == (5 if expanded else 2)
    await loss.backward()
    same(x.grad, steps[-1].accumulated.values)


async def test_gradients_on_a_device() -> None:
    @custom_function()
    def broken(ctx: Any, g: Any) -> Any:
        raise ValueError

    with ToyDevice("toy:0"):
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        on_device = x.to("toy:0")
        steps = await ag.viz.step((on_device * on_device).sum(), params={"x": x})
        failed = await ag.viz.step(broken.apply(on_device).sum())
        assert str(failed[-1].inputs[0]) == "2 float32 toy:0: not read"
        assert str(steps[1].contributions[1].total) == "2 float32 toy:0: [2., 4.]" and str(steps[-1].accumulated) == "2 float32: [2., 4.]"


async def test_the_record_ends_where_values_came_from_another_worker() -> None:
    async with workers("here", "there", service=service) as (here, _), here.context() as ctx:
        x = leaf(2)
        y = await here.call("there", "squared", x)
        loss = (y * 3).sum()
        steps = await ag.viz.step(loss)
        assert steps.error is None and [step.node for step in steps][-1] == "RecvNode"
        assert steps[-1].inputs[0].values.tolist() == [3, 3] and "came from there" in steps[-1].note and steps[-1].note in str(steps)
        assert len(await ag.viz.step(y.sum() * 1, params={})) == 3 and len(await ag.viz.step(y, ag.ones(2, dtype=np.float64))) == 1
        await ctx.backward(loss)
        np.testing.assert_allclose(ctx.grads[x].numpy(), 6 * x.numpy())


# -------------------------------------------------------------------- what goes wrong


async def test_a_rule_that_fails_is_the_last_step() -> None:
    @custom_function()
    def broken(ctx: Any, g: Any) -> Any:
        raise ValueError(f"no {HOSTILE}")

    x = leaf(2)
    loss = (broken.apply(x) * 2).sum() + x.sum()
    steps = await ag.viz.step(loss)
    assert isinstance(steps.error, ValueError) and "brokenBackward" in "".join(steps.error.__notes__) and "failed with ValueError" in repr(steps)
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(steps.error.__traceback__)]
    assert modules[-1] == __name__ and "aiograd.viz.stepping" not in modules, "the error leads to the rule, and not to all of the pass"
    assert steps[-1].title == "brokenBackward" and steps[-1].error == f"ValueError: no {HOSTILE}" and steps[-1].error in str(steps)
    assert [step.error for step in steps[:-1]] == [""] * (len(steps) - 1) and steps[-1].inputs[0].values.tolist() == [2, 2]
    page = Page(steps.html)
    assert page.text.count(steps[-1].error) == 2 and "The pass has failed" in page.text and x.grad is None
    assert "b" not in [tag for tag, _ in page.elements]
    await assert_awaiting_raises(ValueError, "no <b>", loss.backward(retain_graph=True))


async def test_cancelling_leaves_no_trace() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    @custom_function()
    async def held(ctx: Any, g: Any) -> Any:
        begun.set()
        await go.wait()
        return g

    x = leaf(2)
    loss = held.apply(x).sum()
    stepping = asyncio.create_task(ag.viz.step(loss))
    await begun.wait()
    await cancel(stepping)
    go.set()
    await loss.backward()
    assert x.grad.tolist() == [1, 1]


async def test_wrong_arguments() -> None:
    x = leaf(2)
    used = (x * x).sum()
    await used.backward()
    for error, match, call in (
        (GraphFreedError, "second time", lambda: ag.viz.step(used)),
        (NoGraphError, "does not require grad", lambda: ag.viz.step(ag.tensor(1.0))),
        (ArgumentTypeError, "expected one Tensor, the loss, found list", lambda: ag.viz.step([x.sum()])),
        (ArgumentTypeError, "names is a dict", lambda: ag.viz.step(x.sum(), names={})),
        (ShapeError, "only for scalar outputs", lambda: ag.viz.step(x * 2)),
        (ArgumentError, "max_nodes=1", lambda: ag.viz.step(x.sum(), max_nodes=1)),
        (ArgumentError, "max_elements is -1", lambda: ag.viz.step(x.sum(), max_elements=-1)),
    ):
        await assert_awaiting_raises(error, match, call())
    x._node.extra.reducer = object()  # type: ignore[assignment, union-attr]
    await assert_awaiting_raises(ArgumentError, "combined with other processes", ag.viz.step(x.sum()))


async def test_the_record_keeps_no_graph() -> None:
    with reference_counts_only():
        x = leaf(2)
        product = x * x
        node = weakref.ref(product.grad_fn)
        steps = await ag.viz.step(product.sum())
        del product
        assert node() is None and len(steps) == 3


# -------------------------------------------------------------------- text and page


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_says_what_the_record_says(tmp_path: Path) -> None:
    loss, params = random_graph(3)
    steps = await ag.viz.step(loss, params=params)
    page = Page(steps.html)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("article") == len(steps) + 2 and tags.count("button") == 5 and tags.count("svg") == 1
    for step in steps:
        for each in (*step.inputs, *(contribution.total for contribution in step.contributions)):
            assert each.content in page.text
    assert not [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href", "onclick", "style")]
    steps.save(tmp_path / "step.html")
    assert (tmp_path / "step.html").read_text(encoding="utf-8") == steps.html
    frame = steps._repr_html_()
    ((tag, attributes),) = Page(frame).elements
    assert tag == "iframe" and attributes["srcdoc"] == steps.html and attributes["sandbox"] == "allow-scripts"
    assert unescape(frame).count("<article>") == len(steps) + 2


async def test_names_that_users_choose_are_text() -> None:
    @custom_function()
    def rule(ctx: Any, g: Any) -> Any:
        return g

    rule.__name__ = HOSTILE
    x = leaf(2)
    x.register_hook(type(HOSTILE, (), {"__call__": lambda self, grad: None})())
    steps = await ag.viz.step(rule.apply(x).sum(), params={HOSTILE: x})  # a line with <b> in it
    page = Page(steps.html)
    tags = [tag for tag, _ in page.elements]
    assert "b" not in tags and tags.count("script") == 2
    assert "a line with <b> in it" in page.text and page.text.count(HOSTILE) >= 8, "in the picture, as titles, targets and hooks"


async def test_text_at_the_prompt() -> None:
    x = leaf(2)
    steps = await ag.viz.step((x * x).sum(), params={"x": x})
    values = x.numpy()
    numbers = np.array2string(values, precision=4, separator=", ")
    total = np.array2string(2 * values, precision=4, separator=", ")
    assert str(steps).split("\n") == [
        "the pass begins with scalar float64: 1.",
        "step 1: SumBackward",
        "  in: scalar float64: 1.",
        "  to MulBackward (step 2): 2 float64: [1., 1.]",
        "step 2: MulBackward",
        "  in: 2 float64: [1., 1.]",
        f"  to x (step 3): 2 float64: {numbers}; 1 of 2 there, sum 2 float64: {numbers}",
        f"  to x (step 3): 2 float64: {numbers}; 2 of 2 there, sum 2 float64: {total}",
        "step 3: x",
        f"  in: 2 float64: {total}",
        f"  to .grad: 2 float64: {total}",
    ]
    assert repr(steps) == "<PassSteps: 3 steps>" and steps[1:] == tuple(steps)[1:]
