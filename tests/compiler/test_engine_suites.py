"""The engine's suites of lag, cancellation, transaction, hooks and nested passes once more, with programs for nodes: operators are compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiograd as ag
from tests.engine import test_async_cancellation, test_async_fairness, test_async_hooks, test_async_transaction, test_reentrant
from tests.engine.cases import chain

SUITES = (test_async_cancellation, test_async_fairness, test_async_hooks, test_async_transaction, test_reentrant)

OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "pow", "neg", "matmul")
METHODS = ("sum", "mean")


def through(name: str, function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """The operator as a program: recorded where its arguments are new, then run."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    plain.__name__ = name.strip("_").removeprefix("r").capitalize()
    compiled = ag.compile(plain, on_break="eager", max_signatures=1 << 20)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[-1], (ag.Tensor, int, float)):
            return function(*args, **kwargs)
        recordings = compiled._recordings
        result = compiled(*args, **kwargs)
        return result if compiled._recordings == recordings else compiled(*args, **kwargs)

    return run, compiled


OPERATORS_THROUGH = {name: through(name, getattr(ag.Tensor, name)) for name in (*(f"__{operator}__" for operator in OPERATORS), *METHODS)}


LINKS, _ = through("chain", chain)


def chain_of_programs(x: ag.Tensor, length: int, factor: float = 1.0) -> ag.Tensor:
    """As `chain`: programs of three statements each, so that there are steps between them."""
    for start in range(0, length, 3):
        x = LINKS(x, min(3, length - start), factor)
    return x


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, (run, _) in OPERATORS_THROUGH.items():
        monkeypatch.setattr(ag.Tensor, name, run)
    monkeypatch.setattr(test_async_cancellation, "chain", chain_of_programs)
    yield
    statistics = {name: compiled.statistics() for name, (_, compiled) in OPERATORS_THROUGH.items()}
    assert all(each.runs >= each.recordings and not each.breaks for each in statistics.values()), statistics


#: graphs so large that the eager suite is enough: programs of one row each cost several times a row
LARGE = ("test_a_chain_of_a_million_nodes", "test_a_hundred_thousand_contributions_to_one_leaf", "test_a_deep_graph_whose_pass_is_cancelled")

for _suite in SUITES:
    for _name, _thing in vars(_suite).items():
        if _name.startswith("test_") and _name not in LARGE:
            globals()[f"{_name}_of_{_suite.__name__.rpartition('_')[2]}"] = _thing
        elif hasattr(_thing, "_pytestfixturefunction") or type(_thing).__name__ == "FixtureFunctionDefinition":
            globals()[_name] = _thing


def test_operators_run_as_programs() -> None:
    """The fixture above puts programs in the place of operators: each use runs one, be it recorded here or before."""
    before = {name: compiled.statistics() for name, (_, compiled) in OPERATORS_THROUGH.items()}
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    for _ in range(3):
        y = (-(x * 2.0 + 1.0) - x / 4.0) ** 2
        z = (3.0 - y + (1.0 + 2.0 * y)).sum() + (y @ y).mean()
    assert z.shape == ()
    for name, (_, compiled) in OPERATORS_THROUGH.items():
        statistics = compiled.statistics()
        assert statistics.runs - before[name].runs >= 3, (name, statistics)
