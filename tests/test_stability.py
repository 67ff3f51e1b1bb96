"""Levels of public names, and deprecated ones."""

from __future__ import annotations

import re
import warnings

import pytest

import aiograd as ag
from aiograd.running.stability import LEVELS, Stability, deprecated, stability_of
from tests.documentation import ROOT
from tests.public_names import MODULES, public_callables, public_names

pytest_plugins = ["pytester"]


def test_every_public_name_has_a_level() -> None:
    names = [f"{module}.{public.name}" for module in MODULES for public in public_names(module)]
    levels = [stability_of(name) for name in names]
    assert len(levels) > 1000 and set(levels) == set(Stability)
    assert set(MODULES) <= LEVELS.keys(), "each public module has an entry of its own"
    assert stability_of("aiograd.tensor") is Stability.STABLE and stability_of("aiograd.compile") is Stability.PROVISIONAL
    with pytest.raises(KeyError, match=re.escape("numpy.add has no level")):
        stability_of("numpy.add")


def test_every_entry_is_a_public_module_or_name() -> None:
    names = {f"{module}.{public.name}" for module in MODULES for public in public_names(module)}
    assert not LEVELS.keys() - names - set(MODULES)


def test_the_page_lists_what_is_not_stable() -> None:
    page = (ROOT / "docs" / "reference" / "stability.md").read_text()
    for name, level in LEVELS.items():
        if level is not Stability.STABLE:
            assert f"`{name}`" in page or f"`{name.rpartition('.')[2]}`" in page, name


def test_no_deprecated_name_outlives_its_version() -> None:
    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", version)[:3]))

    for name, value in public_callables():
        removed_in = vars(value).get("__removed_in__") if hasattr(value, "__dict__") else None
        assert removed_in is None or number(removed_in) > number(ag.__version__), f"{name} was to be removed in {removed_in}"


@deprecated(instead="new()", since="0.1", removed_in="0.3")
def old(x: int) -> int:
    """An old function."""
    return x + 1


@deprecated(instead="new()", since="0.1", removed_in="0.3")
async def old_coroutine(x: int) -> int:
    return x + 1


@deprecated(instead="New", since="0.1", removed_in="0.3")
class Old:
    """An old class."""

    def __init__(self, x: int) -> None:
        self.x = x


async def test_a_deprecated_name_works_and_warns_at_the_line_that_uses_it() -> None:
    with pytest.warns(DeprecationWarning, match=r"old is deprecated since aiograd 0.1 and goes away in 0.3: use new\(\)") as found:
        assert old(1) == 2
    assert found[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="old_coroutine"):
        assert await old_coroutine(1) == 2
    with pytest.warns(DeprecationWarning, match="Old is deprecated.*use New"):
        assert Old(3).x == 3
    assert old.__name__ == "old" and "old function" in (old.__doc__ or "") and isinstance(Old, type)
    with warnings.catch_warnings(), pytest.raises(DeprecationWarning):
        warnings.simplefilter("error")
        old(1)


USE = """
    import warnings
    from aiograd.running.stability import deprecated

    @deprecated(instead="new()", since="0.1", removed_in="0.3")
    def old():
        return 1

    def test_use():
        assert old() == 1
"""


@pytest.mark.parametrize(("line", "outcome"), [("", "failed"), ("filterwarnings = ignore:.*deprecated since aiograd", "passed")])
def test_the_plugin_makes_uses_errors_unless_the_project_says_otherwise(pytester: pytest.Pytester, line: str, outcome: str) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    pytester.makepyfile(USE)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(**{outcome: 1})


