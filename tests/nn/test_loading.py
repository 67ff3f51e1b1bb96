"""State dicts with a prefix, states that take the place of parameters, and modules found by path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, UnknownNameError
from tests.support import assert_raises


class Tied(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(2, 2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(2), nn.Identity()])
        self.more = nn.ParameterList([nn.Parameter([1.0]), nn.Parameter([2.0])])
        self.last = nn.Linear(2, 2, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x)) * self.more[0]


def test_a_prefix_is_put_before_each_path_as_it_is() -> None:
    layer = nn.Linear(2, 3)
    assert [*layer.state_dict(prefix="m.")] == ["m.weight", "m.bias"] and [*layer.state_dict("m")] == ["mweight", "mbias"]
    assert [*nn.Sequential(layer).state_dict(prefix="net.0.")] == ["net.0.0.weight", "net.0.0.bias"]


async def test_assigned_states_keep_dtype_memory_and_ties() -> None:
    net, rng = Tied(), np.random.default_rng(0)
    net.first.weight.requires_grad_(False)
    state = {path: rng.normal(size=value.shape) if value.dtype.kind == "f" else np.array(7) for path, value in net.state_dict().items()}
    state["last.weight"] = state["first.weight"]
    before = net.first.weight
    assert net.load_state_dict(state, assign=True) == ((), ())
    assert net.first.weight is net.last.weight is not before and isinstance(net.first.weight, nn.Parameter) and not net.first.weight.requires_grad
    assert net.first.weight.dtype == np.float64 and np.shares_memory(net.first.weight.numpy(), state["first.weight"])
    assert {path: value.tolist() for path, value in net.state_dict().items()} == {path: value.tolist() for path, value in state.items()}
    assert net.more[1].requires_grad and net.more[1].dtype == np.float64 and net.norms[0].num_batches_tracked.item() == 7
    await net(ag.ones(1, 2, dtype=ag.float64)).sum().backward()
    assert net.more[0].grad is not None and net.first.weight.grad is None


def test_a_state_that_cannot_take_the_place_changes_nothing() -> None:
    net = nn.Linear(2, 2)
    before = net.weight
    with pytest.raises(ArgumentError, match=r"weight: found shape \[3, 2\](.|\n)*bias: found dtype int64, expected a floating one"):
        net.load_state_dict({"weight": np.ones((3, 2)), "bias": np.ones(2, np.int64)}, assign=True)
    assert net.weight is before


def test_modules_by_path() -> None:
    net = Tied()
    assert net.get_submodule("") is net and net.get_submodule("norms.0") is net.norms[0]
    assert_raises(UnknownNameError, r"get_submodule\('norms.nul'\): norms has no attribute 'nul'", net.get_submodule, "norms.nul")
    assert_raises(AttributeError, "Tied has no attribute 'frist'; the nearest is 'first'", net.get_submodule, "frist.x")


def test_casts_of_a_module() -> None:
    layer = nn.Linear(2, 2)
    assert layer.half().weight.dtype == np.float16 and layer.double().weight.dtype == np.float64 and layer.float().weight.dtype == np.float32
