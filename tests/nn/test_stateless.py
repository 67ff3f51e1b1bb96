"""Forward hooks, functional_call, and parameters in lists and dicts."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError
from tests.support import assert_awaiting_raises, assert_raises, draw


class Later(nn.Module):
    """A forward that lets others run in its middle."""

    def __init__(self) -> None:
        self.inner = nn.Linear(2, 2, dtype=np.float64)

    async def forward(self, x: Any) -> Any:
        first = self.inner(x)
        await asyncio.sleep(0)
        return first + self.inner(x)


def test_hooks_see_and_replace_arguments_and_outputs_in_order() -> None:
    module, seen = nn.Identity(), []
    first = module.register_forward_pre_hook(lambda m, args: seen.append(("pre", m is module, args)))
    module.register_forward_pre_hook(lambda m, args: args[0] + 1)
    module.register_forward_pre_hook(lambda m, args: (args[0] * 10,), prepend=True)
    module.register_forward_hook(lambda m, args, out: seen.append(("post", args, out)))
    last = module.register_forward_hook(lambda m, args, kwargs, out: out + len(kwargs), with_kwargs=True)
    assert module(3) == 31
    assert seen == [("pre", True, (30,)), ("post", (31,), 31)]
    first.remove()
    last.remove()
    assert copy.deepcopy(module)(1) == 11 and len(seen) == 3


async def test_hooks_of_a_coroutine_get_its_result_and_may_be_coroutines() -> None:
    module, seen = Later(), []

    async def before(m: Any, args: Any) -> Any:
        await asyncio.sleep(0)
        return (args[0] * 2,)

    async def after(m: Any, args: Any, out: Any) -> None:
        await asyncio.sleep(0)
        seen.append(out)

    x = ag.tensor([1.0, 2.0], dtype=np.float64)
    wanted = await module(x * 2)
    with module.register_forward_pre_hook(before), module.register_forward_hook(after):
        out = await module(x)
    np.testing.assert_array_equal(out.detach().numpy(), wanted.detach().numpy())
    assert seen == [out]
    plain = nn.Identity()
    plain.register_forward_hook(after)
    assert await plain(5) == 5


async def test_an_error_in_a_hook_or_forward_reaches_the_caller() -> None:
    module = Later()

    async def fails(m: Any, args: Any) -> None:
        raise ValueError("no")

    handle = module.register_forward_pre_hook(fails)
    await assert_awaiting_raises(ValueError, "no", module(ag.tensor([1.0, 2.0], dtype=np.float64)))
    handle.remove()
    assert_raises(ArgumentTypeError, None, module.register_forward_hook, 3)


async def test_functional_call_changes_nothing_and_may_run_at_once_with_others() -> None:
    module = Later()
    own = {name: value.clone() for name, value in module.state_dict().items()}
    x = ag.tensor([1.0, 2.0], dtype=np.float64)
    given = [{"inner.weight": ag.tensor(draw(2, 2, at=i), requires_grad=True)} for i in range(3)]
    outs = await asyncio.gather(*(nn.functional_call(module, each, x) for each in given), module(x))
    for each, out in zip([*given, own], outs, strict=True):
        wanted = 2 * (each["inner.weight"].detach().numpy() @ x.numpy() + own["inner.bias"].numpy())
        np.testing.assert_allclose(out.detach().numpy(), wanted)
    await outs[0].sum().backward()
    np.testing.assert_allclose(given[0]["inner.weight"].grad.numpy(), 2 * np.ones((2, 1)) * x.numpy())
    assert module.inner.weight.grad is None
    assert all((module.state_dict()[name] == value).all() for name, value in own.items())


def test_functional_call_of_shared_weights_and_buffers() -> None:
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    x, w = np.array([1.0, 2.0], np.float32), ag.tensor(draw(2, 2).astype(np.float32))
    np.testing.assert_allclose(ag.functional_call(tied, {"0.weight": w}, (x,)).numpy(), w.numpy() @ (w.numpy() @ x), rtol=1e-5, atol=1e-6)
    untied = ag.functional_call(tied, {"0.weight": w}, x, tie_weights=False)
    np.testing.assert_allclose(untied.detach().numpy(), tied[1].weight.detach().numpy() @ w.numpy() @ x, rtol=1e-5, atol=1e-6)
    norm, mean = nn.BatchNorm1d(2), ag.tensor(np.zeros(2, np.float32))
    nn.functional_call(norm, [{"running_mean": mean}, {"weight": ag.tensor(np.ones(2, np.float32))}], draw(5, 2).astype(np.float32))
    assert mean.numpy().any() and not norm.running_mean.numpy().any()


def test_functional_call_refuses_what_does_not_fit() -> None:
    module, w = nn.Linear(2, 2), ag.tensor(np.ones((2, 2), np.float32))
    for given, options, match in (
        ({"wait": w}, {}, "it has no wait"),
        ({"weight": w}, {"strict": True}, "not given: bias"),
        ([{"weight": w}, {"weight": w}], {}, "given twice"),
        ({"weight": w[0]}, {}, "expected \\[2, 2\\]"),
    ):
        with pytest.raises(ArgumentError, match=match):
            nn.functional_call(module, given, w, **options)
    assert_raises(ArgumentTypeError, None, lambda: nn.functional_call(module, {"weight": np.ones((2, 2))}, w))


def test_parameters_in_lists_and_dicts_belong_to_the_state() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            self.steps = nn.ParameterList([nn.Parameter(np.ones(2)), ag.tensor([1.0, 2.0])])
            self.named = nn.ParameterDict({"a": nn.Parameter(np.zeros(3))})

    module = Several()
    module.steps.append(nn.Parameter(np.full(1, 7.0)))
    module.steps[0] = nn.Parameter(np.full(2, 5.0))
    module.named.update({"b": ag.tensor([4.0])})
    assert list(module.state_dict()) == ["steps.0", "steps.1", "steps.2", "named.a", "named.b"]
    assert [len(module.steps), module.steps[-1].item(), len(module.steps[1:])] == [3, 7.0, 2]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())
    assert "a" in module.named and module.named.pop("a").shape == (3,) and list(module.named) == ["b"]
    assert module.named.get("z") is None and "(b): float32 [1]" in repr(module)
    assert_raises(IndexError, None, lambda: module.steps[3])
    assert_raises(KeyError, "it has b", lambda: module.named["a"])
    assert_raises(ArgumentTypeError, None, lambda: module.steps.extend([nn.Parameter([1.0]), 3]))
    assert len(module.steps) == 3
    assert_raises(ArgumentTypeError, None, module.steps, 1)
