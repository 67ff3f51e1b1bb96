"""The lowest versions that the requirements of a project allow."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


class UnboundedError(Exception):
    """A requirement without a lower bound."""


def project() -> dict[str, Any]:
    """The table ``project`` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def requirements(table: Mapping[str, Any], extras: Collection[str], python: str) -> Iterator[Requirement]:
    """The requirements of a project with these extras on this version of Python, with those of extras that an extra names.

    Args:
        table: as of `project`.
        extras: names.
        python: such as "3.13".
    """
    listed: list[str] = [*table["dependencies"], *(each for extra in extras for each in table["optional-dependencies"][extra])]
    for text in listed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python, "python_full_version": f"{python}.0"}):
            continue
        if requirement.name == table["name"]:
            yield from requirements({**table, "dependencies": []}, sorted(requirement.extras), python)
        else:
            yield requirement


def lowest(found: Iterator[Requirement] | Sequence[Requirement]) -> list[str]:
    """Each requirement as a pin of the lowest version that it allows; of several with one name the highest of these.

    Raises:
        UnboundedError: one has no lower bound.
    """
    pins: dict[str, Version] = {}
    for requirement in found:
        bounds = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
        if requirement.name in pins and not bounds:
            continue
        if not bounds:
            raise UnboundedError(f"{requirement} has no lower bound")
        pins[requirement.name] = max(*bounds, pins.get(requirement.name, bounds[0]))
    return [f"{name}=={version}" for name, version in pins.items()]


def tools(table: Mapping[str, Any]) -> list[str]:
    """The requirements of the tests: pytest, its plugins, hypothesis and the recorder of spans, as the extra ``dev`` holds them."""
    return [text for text in table["optional-dependencies"]["dev"] if text.startswith(("pytest", "hypothesis", "opentelemetry-sdk"))]
