"""The output of a notebook: HTML and SVG of tensors, modules, summaries, schedules, timelines and graphs; and progress."""

from __future__ import annotations

import asyncio
import io
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest

import aiograd as ag
from aiograd import pipeline
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running import notebook
from tests.support import assert_raises, custom_function
from tests.toy_device import ToyDevice


class Reader(HTMLParser):
    """The text of some HTML; an element that is not closed, or closed twice, is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def model() -> ag.nn.Module:
    return ag.nn.Sequential(ag.nn.Linear(4, 8), ag.nn.ReLU(), ag.nn.Linear(8, 2))


def test_a_tensor() -> None:
    x = ag.tensor([[1.0, 2.0]], requires_grad=True)
    assert "Tensor [1, 2] float32 on cpu, requires grad" in Reader(x._repr_html_()).text
    assert "MulBackward" in Reader((x * 2)._repr_html_()).text


def test_names_that_users_choose_are_text() -> None:
    @custom_function(lambda x: x * 2)
    def Evil(ctx: Any, g: Any) -> Any:
        return g * 2

    Evil.__name__ = "<script>alert(1)</script>"
    read = Reader(Evil.apply(ag.tensor([1.0], requires_grad=True))._repr_html_())
    assert "script" not in read.tags and "<pre" not in read.text

    class Named(ag.nn.Module):
        def extra_repr(self) -> str:
            return "<b>bold</b>"

    assert "b" not in Reader(Named()._repr_html_()).tags
    assert Reader(notebook.table("<i>", ["<i>"], [["<i>"]])).tags == ["div", "div", "table", "tr", "th", "tr", "td"]


def test_a_tensor_of_a_device_is_shown_without_waiting() -> None:
    with ToyDevice("toy:0"):
        assert "on toy:0" in Reader(ag.tensor([1.0, 2.0]).to("toy:0")._repr_html_()).text


def test_a_module() -> None:
    read = Reader(model()._repr_html_())
    assert "Sequential(), 58 parameters" in read.text and "0: Linear(in_features=4" in read.text and "40 parameters" in read.text


def test_a_summary() -> None:
    net = model()
    table = ag.nn.summary(net, ag.zeros((5, 4)))
    assert [(layer.name, layer.type, layer.outputs, layer.parameters) for layer in table.layers] == [
        ("", "Sequential", ((5, 2),), 58),
        ("0", "Linear", ((5, 8),), 40),
        ("1", "ReLU", ((5, 8),), 0),
        ("2", "Linear", ((5, 2),), 18),
    ]
    whole, *parts = (layer.cost for layer in table.layers)
    assert whole == pytest.approx(sum(parts)) and min(parts) > 0
    assert (table.parameters, table.trainable) == (58, 58)
    lines = str(table).split("\n")
    assert lines[0] == "Sequential: 58 parameters, 58 trainable" and lines[1].split() == ["layer", "type", "output", "parameters", "cost"]
    assert "[5, 8]" in Reader(table._repr_html_()).text
    assert all("forward" not in layer.__dict__ for layer in net.modules()), "the layers are what they were"


def test_a_summary_counts_what_is_shared_once_and_what_is_frozen_apart() -> None:
    class Twice(ag.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ag.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.layer(self.layer(x))

    net = Twice()
    net.layer.bias.requires_grad_(False)
    table = ag.nn.summary(net, ag.zeros((1, 3)))
    assert [(layer.name, layer.parameters) for layer in table.layers] == [("", 12), ("layer", 12), ("layer", 0)]
    assert (table.parameters, table.trainable) == (12, 9)


def test_a_summary_that_fails_leaves_the_module_as_it_was() -> None:
    net = model()
    assert_raises(ag.errors.ShapeError, None, lambda: ag.nn.summary(net, ag.zeros((5, 3))))
    assert all("forward" not in layer.__dict__ for layer in net.modules())

    class Waits(ag.nn.Module):
        async def forward(self, x: Any) -> Any:
            return x

    assert_raises(ArgumentError, r"Waits\.forward is `async def`", lambda: ag.nn.summary(Waits(), ag.zeros(())))
    assert_raises(ArgumentTypeError, "expected a Module, found int", ag.nn.summary, 3)


def test_a_schedule_and_its_timeline() -> None:
    schedule = pipeline.make_schedule("1F1B", 2, 3)
    read = Reader(schedule._repr_html_())
    assert read.tags.count("tr") == 3 and "rank 1" in read.text and "1B2" in read.text
    picture = pipeline.simulate(schedule, pipeline.Costs(1, 1, 1))._repr_svg_()
    assert ET.fromstring(picture).tag.endswith("svg")  # noqa: S314 - our own text
    long = pipeline.Schedule([[pipeline.Action.parse(f"0F{i}") for i in range(1000)]])
    assert "the first 200 of 1000 steps" in Reader(long._repr_html_()).text


def test_a_graph_with_the_names_of_a_module() -> None:
    net = model()
    picture = ag.viz.graph_svg(net(ag.zeros((1, 4))).sum(), names=net)
    assert isinstance(picture, str) and picture._repr_svg_() == picture
    assert all(name in picture for name, _ in net.named_parameters())
    assert "2.bias" in ag.viz.graph_dot(net(ag.zeros((1, 4))).sum(), names=net)
    assert_raises(ArgumentTypeError, "names is a dict; expected a module", lambda: ag.viz.graph_svg(net(ag.zeros((1, 4))).sum(), names={}))


def test_progress_gives_the_same_items(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ag.progress(range(5), "counting")) == [0, 1, 2, 3, 4]
    shown = capsys.readouterr().err
    assert "counting" in shown and "5/5" in shown


async def test_progress_of_an_asynchronous_iterable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    async def numbers() -> Any:
        for i in range(3):
            await asyncio.sleep(0)
            yield i

    assert [i async for i in ag.progress(numbers(), total=3)] == [0, 1, 2]
    assert "3/3" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    items = [1, 2]
    assert ag.progress(items) is items
