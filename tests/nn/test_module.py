"""Module and Parameter: what belongs to a module, its state, moving and copying it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, ModifiedError
from aiograd.optim import SGD
from aiograd.running.offloading import ready
from aiograd.running.random import Generator
from tests.support import assert_awaiting_raises, assert_raises
from tests.toy_device import ToyDevice


class Net(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(3, 4, generator=Generator(1))
        self.scale = nn.Parameter([1.0, 2.0, 3.0, 4.0])
        self.register_buffer("count", ag.tensor(0))
        self.register_buffer("scratch", ag.tensor([0.0]), persistent=False)
        self.second = nn.Sequential(nn.Linear(4, 2, bias=False, generator=Generator(2)), nn.Tanh())

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * self.scale)


# ---- parameters


def test_a_parameter_is_a_leaf_whose_results_are_tensors() -> None:
    p = nn.Parameter([1.0, 2.0])
    assert p.requires_grad
    assert p.is_leaf
    assert p.dtype == np.float32
    assert type(p * 2) is ag.Tensor
    assert type(p.detach()) is ag.Tensor
    assert np.shares_memory(p.detach().numpy(), p.detach().numpy())
    assert "Parameter" in repr(p)
    x = ag.tensor([1.0], requires_grad=True)
    from_graph = nn.Parameter(x * 2, requires_grad=False)
    assert from_graph.grad_fn is None
    assert not from_graph.requires_grad
    assert_raises(ArgumentTypeError, None, nn.Parameter, [1, 2])


def test_deepcopy_of_a_parameter_is_a_parameter() -> None:
    p = nn.Parameter([1.0, 2.0])
    p.grad = ag.tensor([3.0, 4.0])
    q = copy.deepcopy(p)
    assert type(q) is nn.Parameter
    assert q.requires_grad
    assert q.grad.tolist() == [3.0, 4.0]
    q.detach().fill_(0.0)
    assert p.tolist() == [1.0, 2.0]


def test_a_parameter_takes_attributes_and_copies_keep_them() -> None:
    p = nn.Parameter([1.0, 2.0])
    p.tag = ["decay"]
    shallow, deep = copy.copy(p), copy.deepcopy(p)
    assert shallow.tag is p.tag and deep.tag == ["decay"] and deep.tag is not p.tag
    assert not hasattr(nn.Parameter([1.0]), "tag")


# ---- what belongs to a module


def test_attributes_are_the_registry() -> None:
    net = Net()
    assert [name for name, _ in net.named_parameters()] == ["scale", "first.weight", "first.bias", "second.0.weight"]
    assert [name for name, _ in net.named_buffers()] == ["count", "scratch"]
    assert [name for name, _ in net.named_children()] == ["first", "second"]
    assert [name for name, _ in net.named_modules()] == ["", "first", "second", "second.0", "second.1"]
    assert [name for name, _ in net.named_parameters(recurse=False)] == ["scale"]
    assert next(name for name, _ in net.named_parameters("net")) == "net.scale"
    del net.scale
    net.extra = nn.Identity()
    assert "scale" not in dict(net.named_parameters())
    assert "extra" in dict(net.named_modules())
    assert len(list(net.parameters())) == 3


def test_what_is_shared_counts_once_but_is_saved_under_each_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    assert list(net.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    loop = nn.Module()
    loop.again = loop
    assert len(list(loop.modules())) == 1


def test_assignments_that_would_lose_a_parameter_are_refused() -> None:
    net = Net()
    for name, value in (("scale", ag.tensor([1.0])), ("first", 3), ("count", 5)):
        assert_raises(ArgumentTypeError, name, setattr, net, name, value)
    net.scale = None
    assert "scale" not in dict(net.named_parameters())
    net.scale = nn.Parameter([2.0])
    assert "scale" in dict(net.named_parameters())
    net.count = ag.tensor(7)
    assert dict(net.named_buffers())["count"].item() == 7


@pytest.mark.parametrize(
    "wrong",
    [
        lambda net: net.register_buffer("a.b", ag.tensor(0)),
        lambda net: net.register_buffer("forward", ag.tensor(0)),
        lambda net: net.register_buffer("b", 3),
        lambda net: net.register_parameter("p", ag.tensor(0.0)),
        lambda net: net.add_module("m", 3),
        lambda net: net.add_module("", nn.Identity()),
        lambda net: net.first.register_buffer("weight", ag.tensor(0.0)),
        lambda net: net.first.register_buffer("weight", None),
        lambda net: net.register_buffer("first", ag.tensor(0.0)),
        lambda net: net.register_parameter("first", nn.Parameter(0.0)),
        lambda net: net.register_parameter("count", nn.Parameter(0.0)),
        lambda net: net.add_module("count", nn.Identity()),
        lambda net: net.first.add_module("weight", nn.Identity()),
        lambda net: net.to(np.int32),
        lambda net: net.to(dtype=bool),
        lambda net: net.to(dtype="nothing"),
    ],
)
def test_wrong_registrations_end_in_a_typed_error(wrong: Any) -> None:
    net = Net()
    before = {name: id(part) for name, part in (*net.named_parameters(), *net.named_buffers(), *net.named_modules())}
    assert_raises(ArgumentError, None, lambda: wrong(net))
    assert before == {name: id(part) for name, part in (*net.named_parameters(), *net.named_buffers(), *net.named_modules())}
    assert net.first.weight.dtype == np.float32


def test_a_name_is_registered_again_for_the_same_kind_or_once_it_is_free() -> None:
    net = Net()
    net.register_buffer("count", ag.tensor(3))
    net.first.register_parameter("weight", nn.Parameter(ag.ones(3, 2)))
    net.add_module("first", nn.Identity())
    assert net.count.item() == 3 and not list(net.first.parameters())
    layer = nn.Linear(2, 3)
    del layer.weight
    layer.register_buffer("weight", ag.ones(3, 2))
    assert [name for name, _ in layer.named_buffers()] == ["weight"]


def test_a_module_without_forward_says_so() -> None:
    assert_raises(NotImplementedError, "forward", lambda: nn.Module()(1))


async def test_forward_may_be_async() -> None:
    class Slow(nn.Module):
        async def forward(self, x: Any) -> Any:
            return x * 2

    x = ag.tensor([1.0])
    assert (await Slow()(x)).tolist() == [2.0]
    assert (await nn.Identity()(x)).tolist() == [1.0], "a Tensor is awaitable too"


def test_modes_and_apply_reach_every_module() -> None:
    net = Net()
    assert all(module.training for module in net.modules())
    assert net.eval() is net
    assert not any(module.training for module in net.modules())
    net.train()
    seen: list[str] = []
    net.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "Linear", "Tanh", "Sequential", "Net"]
    net.requires_grad_(False)
    assert not any(p.requires_grad for p in net.parameters())


async def test_zero_grad() -> None:
    net = Net()
    await net(ag.tensor(np.ones((2, 3), np.float32))).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.zero_grad(set_to_none=False)
    assert all(not p.grad.numpy().any() for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_repr_shows_the_tree() -> None:
    assert repr(Net()) == (
        "Net(\n  (first): Linear(in_features=3, out_features=4, bias=True)\n  (second): Sequential(\n"
        "    (0): Linear(in_features=4, out_features=2, bias=False)\n    (1): Tanh()\n  )\n)"
    )


# ---- state


def test_state_dict_holds_parameters_and_persistent_buffers() -> None:
    net = Net()
    state = net.state_dict()
    assert list(state) == ["scale", "count", "first.weight", "first.bias", "second.0.weight"]
    assert all(type(value) is ag.Tensor and not value.requires_grad for value in state.values())
    assert np.shares_memory(state["scale"].numpy(), net.scale.detach().numpy())


def test_load_state_dict_writes_into_the_same_memory() -> None:
    net, other = Net(), Net()
    other.load_state_dict({name: np.asarray(value) + 1 for name, value in net.state_dict().items()})
    weight = other.first.weight
    np.testing.assert_array_equal(weight.detach().numpy(), net.first.weight.detach().numpy() + 1)
    assert other.count.item() == 1
    result = other.load_state_dict({"scale": ag.tensor([0.0] * 4), "what": 1}, strict=False)
    assert result.unexpected_keys == ("what",)
    assert "first.weight" in result.missing_keys
    assert other.first.weight is weight
    assert other.scale.tolist() == [0.0] * 4


def test_a_state_that_does_not_fit_changes_nothing_and_says_all_that_is_wrong() -> None:
    net = Net()
    before = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    state: dict[str, Any] = {name: value.clone() + 1 for name, value in net.state_dict().items()}
    del state["first.bias"]
    state["second.0.weight"] = ag.tensor([1.0])
    state["scale"] = [1.0, 2.0, 3.0, 4.0]
    state["more"] = ag.tensor(0.0)
    caught = assert_raises(ArgumentError, None, net.load_state_dict, state)
    message = str(caught)
    for part in ("missing: first.bias", "unexpected: more", "second.0.weight: found shape [1], expected [2, 4]", "scale: found list"):
        assert part in message
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name])
    assert_raises(ArgumentError, "complex", lambda: net.load_state_dict({**net.state_dict(), "scale": np.ones(4, np.complex64)}))


async def test_a_graph_that_saved_old_values_notices_a_load() -> None:
    net = nn.Linear(2, 2)
    x = ag.tensor([[1.0, 2.0]], requires_grad=True)
    loss = net(x).sum()
    net.load_state_dict(net.state_dict())
    await assert_awaiting_raises(ModifiedError, None, loss.backward())


# ---- copying and moving


async def test_deepcopy_is_independent_and_keeps_sharing() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    twin = copy.deepcopy(net)
    assert twin[1].weight is twin[0].weight
    assert twin[0].weight is not net[0].weight
    x = ag.tensor([[1.0, 2.0]])
    assert twin(x).tolist() == net(x).tolist()
    await twin(x).sum().backward()
    assert net[0].weight.grad is None
    assert twin[0].weight.grad is not None


async def test_to_dtype_keeps_parameters_gradients_and_hooks() -> None:
    net = Net()
    weight = net.first.weight
    calls: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda leaf: calls.append(leaf.dtype))
    x = ag.tensor(np.ones((2, 3), np.float32))
    await net(x).sum().backward()
    assert net.double() is net
    assert net.first.weight is weight
    assert weight.dtype == weight.grad.dtype == np.float64
    assert net.count.dtype == np.int64
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    await net(ag.tensor(np.ones((2, 3)))).sum().backward()
    optimizer.step()
    assert weight.grad.dtype == np.float64
    assert calls == [np.float32, np.float64]
    assert net.to("float32").scale.dtype == np.float32
    assert net.to(np.float16).float().scale.dtype == np.float32


async def test_to_device_and_back() -> None:
    with ToyDevice("toy:0"):
        net = nn.Linear(2, 2, generator=Generator(0))
        values = net.weight.detach().numpy().copy()
        assert net.to("toy:0").weight.device == "toy:0"
        x = ag.tensor([[1.0, 2.0]], device="toy:0")
        loss = net(x).sum()
        await loss.backward()
        assert net.weight.grad.device == "toy:0"
        await ready([net.weight, net.bias, net.weight.grad, net.bias.grad])
        net.cpu()
        np.testing.assert_array_equal(net.weight.detach().numpy(), values)
        assert net.weight.grad.tolist() == [[1.0, 2.0], [1.0, 2.0]]


async def test_a_graph_recorded_before_a_cast_must_not_be_used() -> None:
    net = nn.Linear(2, 2)
    loss = net(ag.tensor([[1.0, 2.0]], requires_grad=True)).sum()
    net.double()
    await assert_awaiting_raises(ModifiedError, None, loss.backward())


# -------------------------------------------------------------------- what is easily got wrong


class Forgetful(nn.Module):
    def forward(self, x: Any) -> Any:
        x * 2


def test_an_argument_that_is_none_is_named() -> None:
    x = ag.ones((2, 3))
    with pytest.raises(ArgumentTypeError, match="Linear.forward: its argument 'input' is None.*Was `return` forgotten"):
        nn.Sequential(nn.Linear(3, 3), Forgetful(), nn.Linear(3, 3))(x)
    for module in (nn.ReLU(), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Conv2d(1, 2, 3), nn.Dropout(), nn.Embedding(3, 3)):
        assert_raises(ArgumentTypeError, f"{type(module).__name__}.forward: its argument 'input' is None", module, None)
    for call, name in (
        (lambda: nn.functional.linear(None, x), "linear: its argument 'x'"),
        (lambda: nn.functional.mse_loss(x, None), "mse_loss: its argument 'target'"),
        (lambda: nn.functional.cross_entropy(None, np.array([1])), "cross_entropy: its argument 'logits'"),
        (lambda: nn.functional.scaled_dot_product_attention(x, None, x), "scaled_dot_product_attention: its argument 'k'"),
        (lambda: nn.functional.relu(None), "an argument"),
    ):
        assert_raises(ArgumentTypeError, f"{name} is None", call)


def test_errors_about_other_things_pass_as_they_are() -> None:
    class Optional(nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            return x.no_such_thing if mask is None else x

    assert_raises(AttributeError, "no_such_thing", lambda: Optional()(ag.ones(2), None))


def test_inplace_is_refused_with_a_reason() -> None:
    for make in (nn.ReLU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Dropout):
        make(inplace=False)
        assert_raises(ArgumentError, rf"{make.__name__}\(inplace=True\): leave it out", make, inplace=True)
    assert_raises(ArgumentError, "leave it out", nn.ReLU, True)
