"""The SVG pictures of the package in one page: the styles of each reach only itself."""

from __future__ import annotations

import asyncio
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag

SVG = "{http://www.w3.org/2000/svg}"


def graph() -> str:
    return str(ag.viz.graph_svg((ag.tensor(np.ones(3), requires_grad=True) * 2.0).sum(), edge_shapes=True))


def program() -> str:
    compiled = ag.compile(lambda x: (x * 2.0).sum())
    compiled(ag.tensor(np.ones(3), requires_grad=True))
    return str(compiled.programs[0].svg())


def timeline() -> str:
    schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=3)
    return ag.pipeline.simulate(schedule, ag.pipeline.Costs(1, 1, 1, 0)).svg()


def jacobian() -> str:
    return asyncio.run(ag.jacobian_plan(lambda x: x[1:] * x[:-1], ag.tensor(np.ones(4)))).svg()


def icon() -> str:
    return (Path(ag.__file__).parent / "dashboard" / "static" / "icon.svg").read_text()


PICTURES = (graph, program, timeline, jacobian, icon)


def elements(picture: Callable[[], str]) -> list[Any]:
    return list(ET.fromstring(picture()).iter())  # noqa: S314 - our own text


@pytest.mark.parametrize("picture", PICTURES)
def test_every_rule_of_a_picture_names_a_class_of_its_root(picture: Callable[[], str]) -> None:
    root, *others = elements(picture)
    styles = [element.text for element in others if element.tag == f"{SVG}style"]
    selectors = [selector.strip() for style in styles for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style) for selector in rule.split(",")]
    assert not styles or len(selectors) > 3
    for selector in selectors:
        assert re.match(r"\.([\w-]+)[ .]", selector), f"{selector!r} reaches into other pictures of the page"
        assert re.match(r"\.([\w-]+)", selector)[1] in root.get("class", "").split()


@pytest.mark.parametrize("picture", PICTURES)
def test_no_picture_refers_to_an_id_which_others_may_have_as_well(picture: Callable[[], str]) -> None:
    for element in elements(picture):
        assert element.get("id") is None
        assert not any("url(#" in value or (value.startswith("#") and name.endswith("href")) for name, value in element.attrib.items())


def test_pictures_of_different_kinds_have_different_classes() -> None:
    by_style: dict[str, set[str]] = {}
    for picture in PICTURES:
        root, *others = elements(picture)
        for style in (element.text for element in others if element.tag == f"{SVG}style"):
            by_style.setdefault(root.get("class"), set()).add(style)
    assert len(by_style) == 3 and all(len(styles) == 1 for styles in by_style.values())
