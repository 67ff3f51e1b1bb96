"""Containers, and sequences with coroutines in them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError
from tests.support import assert_raises


class Add(nn.Module):
    def __init__(self, number: float) -> None:
        self.number = number

    def forward(self, x: Any) -> Any:
        return x + self.number


class Later(Add):
    async def forward(self, x: Any) -> Any:
        return x * self.number


def test_sequential_applies_in_order_and_stays_synchronous() -> None:
    net = nn.Sequential(Add(1), nn.ReLU(), Add(10))
    result = net(ag.tensor([-3.0, 2.0]))
    assert isinstance(result, ag.Tensor)
    assert result.tolist() == [10.0, 13.0]


@pytest.mark.parametrize("kinds", ["ls", "sl", "sls", "lsl", "ll", "ssl", "lss"])
async def test_sequential_becomes_a_coroutine_where_a_child_is_one(kinds: str) -> None:
    net = nn.Sequential(*(Later(2) if kind == "l" else Add(3) for kind in kinds))
    wanted = 1.0
    for kind in kinds:
        wanted = wanted * 2 if kind == "l" else wanted + 3
    pending = net(ag.tensor([1.0]))
    assert inspect.iscoroutine(pending)
    assert (await pending).tolist() == [wanted]
    nested = nn.Sequential(net, Add(1))
    assert (await nested(ag.tensor([1.0]))).tolist() == [wanted + 1]


async def test_gradients_flow_through_an_async_sequence() -> None:
    net = nn.Sequential(nn.Linear(2, 3), Later(2), nn.Linear(3, 1))
    await (await net(ag.tensor([[1.0, 2.0]]))).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_sequential_by_name_and_by_position() -> None:
    net = nn.Sequential({"one": nn.Linear(2, 3), "two": nn.ReLU()})
    assert net.one.out_features == 3
    assert list(net.state_dict()) == ["one.weight", "one.bias"]
    assert_raises(ArgumentError, "named", lambda: net.append(nn.ReLU()))
    plain = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    assert isinstance(plain[1], nn.Tanh)
    assert isinstance(plain[-1], nn.Sigmoid)
    assert isinstance(plain[:2], nn.Sequential)
    assert len(plain[:2]) == 2
    plain[0] = nn.GELU()
    del plain[1]
    assert [type(module).__name__ for module in plain] == ["GELU", "Sigmoid"]
    assert [name for name, _ in plain.named_children()] == ["0", "1"]


def test_module_list() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    layers.append(nn.ReLU()).extend([nn.Tanh()])
    layers.insert(0, nn.Identity())
    assert [type(module).__name__ for module in layers] == ["Identity", "Linear", "Linear", "ReLU", "Tanh"]
    assert list(layers.state_dict()) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert layers[1] in layers
    assert nn.Linear(2, 2) not in layers
    del layers[0:2]
    assert len(layers) == 3
    assert_raises(IndexError, None, lambda: layers[3])
    assert_raises(ArgumentTypeError, None, layers.append, 3)
    assert len(layers) == 3


def test_module_dict() -> None:
    heads = nn.ModuleDict({"a": nn.Linear(2, 2)})
    heads["b"] = nn.ReLU()
    heads.update({"c": nn.Tanh()})
    assert list(heads) == list(heads.keys()) == ["a", "b", "c"]
    assert len(heads) == 3
    assert "b" in heads
    assert [type(module).__name__ for module in heads.values()] == ["Linear", "ReLU", "Tanh"]
    assert dict(heads.items())["a"] is heads["a"]
    del heads["b"]
    assert "b" not in heads
    assert_raises(KeyError, "it has a, c", lambda: heads["b"])
    with pytest.raises(ArgumentError):
        heads["keys"] = nn.ReLU()
