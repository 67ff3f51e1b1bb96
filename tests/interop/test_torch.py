"""Torch modules as nodes: values, gradients, memory and state are those of torch alone."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GraphError
from aiograd.interop.containers import nested_leaves
from tests.interop.torch_support import draw, pair_of, same
from tests.support import assert_awaiting_raises, assert_raises
from tests.tolerance import assert_close

torch: Any = pytest.importorskip("torch", reason="it comes with the extra `torch`")
interop: Any = ag.interop.torch

nn = torch.nn


class Several(nn.Module):  # type: ignore[misc,name-defined]
    """Several inputs, named and nested ones, and outputs of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: Any, pair: Any, *, index: Any = None, factor: float = 1.0) -> Any:
        y = self.linear(x) * factor * self.scale + pair["a"] * pair["b"][0]
        picked = y if index is None else y[index]
        return {"picked": picked.tanh(), "rest": (y.argmax(1), y.detach() * 2, None, [y.sum(0)])}


def integers(*shape: int, below: int = 7) -> Any:
    return np.random.default_rng(1).integers(0, below, shape)


#: name -> a module, and arrays to call it with
LAYERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (draw(4, 5),)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (draw(2, 4, 5),)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), (draw(5, 3), draw(5, 4))),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, stride=2), (draw(2, 3, 9),)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, padding=1), (draw(2, 3, 8, 8),)),
    "conv2d, groups and dilation": (lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2), (draw(2, 4, 9, 9),)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (draw(1, 2, 4, 4, 4),)),
    "conv transpose": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), (draw(2, 3, 5, 5),)),
    "channels last": (lambda: nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last), (draw(2, 3, 8, 8),)),
    "max pool": (lambda: nn.MaxPool2d(2), (draw(2, 3, 8, 8),)),
    "avg pool": (lambda: nn.AdaptiveAvgPool2d(3), (draw(2, 3, 8, 8),)),
    "batch norm": (lambda: nn.BatchNorm1d(5), (draw(8, 5),)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), (draw(4, 3, 5, 5),)),
    "batch norm, eval": (lambda: nn.BatchNorm1d(5).eval(), (draw(8, 5),)),
    "layer norm": (lambda: nn.LayerNorm(6), (draw(4, 6),)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (draw(3, 6, 4),)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (draw(2, 3, 5, 5),)),
    "rms norm": (lambda: nn.RMSNorm(6), (draw(4, 6),)),
    "embedding": (lambda: nn.Embedding(7, 4), (integers(3, 5),)),
    "embedding, sparse": (lambda: nn.Embedding(7, 4, sparse=True), (integers(3, 5),)),
    "embedding bag": (lambda: nn.EmbeddingBag(7, 4, mode="mean"), (integers(3, 5),)),
    "rnn": (lambda: nn.RNN(4, 5, num_layers=2), (draw(6, 3, 4),)),
    "lstm": (lambda: nn.LSTM(4, 5, bidirectional=True, batch_first=True), (draw(3, 6, 4),)),
    "gru": (lambda: nn.GRU(4, 5), (draw(6, 3, 4), draw(1, 3, 5))),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), (draw(3, 4),)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (draw(2, 5, 8), draw(2, 5, 8, at=1), draw(2, 5, 8, at=2))),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (draw(2, 5, 8),)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (draw(2, 5, 8), draw(2, 4, 8))),
    "transformer, eval": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), (draw(2, 5, 8), draw(2, 4, 8))),
    "dropout": (lambda: nn.Dropout(0.4), (draw(6, 8),)),
    "dropout, eval": (lambda: nn.Dropout(0.4).eval(), (draw(6, 8),)),
    "alpha dropout": (lambda: nn.AlphaDropout(0.4), (draw(6, 8),)),
    "dropout 2d": (lambda: nn.Dropout2d(0.4), (draw(3, 4, 2, 2),)),
    "prelu": (lambda: nn.PReLU(3), (draw(4, 3),)),
    "rrelu": (lambda: nn.RReLU(), (draw(4, 3),)),
    "gelu": (lambda: nn.GELU(), (draw(4, 3),)),
    "softmax": (lambda: nn.Softmax(dim=1), (draw(4, 3),)),
    "cosine": (lambda: nn.CosineSimilarity(), (draw(4, 3), draw(4, 3, at=1))),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (draw(1, 2, 3, 3),)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (draw(1, 8, 3, 3),)),
    "unfold": (lambda: nn.Unfold(2), (draw(1, 2, 4, 4),)),
    "cross entropy": (lambda: nn.CrossEntropyLoss(), (draw(6, 7), integers(6))),
    "huber": (lambda: nn.HuberLoss(), (draw(6, 7), draw(6, 7, at=1))),
    "ctc": (lambda: nn.CTCLoss(), (draw(10, 2, 7), integers(2, 4, below=6) + 1, np.array([10, 10]), np.array([4, 3]))),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), (draw(4, 5),)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)), (draw(4, 5),)),
    "in place inside": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (draw(4, 5),)),
    "tied": (lambda: Tied(), (draw(4, 5),)),
    "float64": (lambda: nn.Linear(5, 3).double(), (draw(4, 5, dtype=np.float64),)),
    "half": (lambda: nn.Linear(5, 3).half(), (draw(4, 5, dtype=np.float16),)),
    "complex": (lambda: nn.Linear(5, 3, dtype=torch.complex64), (draw(4, 5).astype(np.complex64),)),
    "scalar": (lambda: nn.Softplus(), (draw(),)),
    "no rows": (lambda: nn.Linear(5, 3), (draw(0, 5),)),
}  # fmt: skip


class Tied(nn.Module):  # type: ignore[misc,name-defined]
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).tanh())


def flat(result: Any, kind: type) -> list[Any]:
    return ag.running.trees.leaves_of(result, kind)


@pytest.mark.parametrize("name", LAYERS)
async def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    make, arrays = LAYERS[name]
    module, layer = pair_of(make)
    floating = [array.dtype.kind in "fc" for array in arrays]
    theirs = [torch.from_numpy(array.copy()).requires_grad_(need) for array, need in zip(arrays, floating, strict=True)]
    ours = [ag.tensor(array, dtype=array.dtype, requires_grad=need) for array, need in zip(arrays, floating, strict=True)]
    for step in range(2):  # the second adds to the gradients of the first
        torch.manual_seed(step)
        expected = flat(module(*theirs), torch.Tensor)
        torch.manual_seed(step)
        found = flat(layer(*ours), ag.Tensor)
        assert [each.requires_grad for each in found] == [each.requires_grad for each in expected]
        for ours_out, theirs_out in zip(found, expected, strict=True):
            same(ours_out, theirs_out, name)
        carriers = [i for i, each in enumerate(expected) if each.requires_grad]
        grads = [np.full(expected[i].shape, 0.5 + i, expected[i].detach().numpy().dtype) for i in carriers]
        torch.autograd.backward([expected[i] for i in carriers], [torch.from_numpy(grad.copy()) for grad in grads])
        await ag.backward([found[i] for i in carriers], [ag.asarray(grad) for grad in grads])
    for mine, other in zip(ours, theirs, strict=True):
        same(mine.grad, other.grad, name)
    for (path, parameter), other in zip(layer.named_parameters(), module.parameters(), strict=True):
        wanted = other.grad.to_dense() if other.grad is not None and other.grad.is_sparse else other.grad
        same(parameter.grad, wanted, f"{name}: {path}")
        same(parameter.grad, layer.module.get_parameter(path).grad, f"{name}: {path}")
    for path, buffer in module.named_buffers():
        same(dict(layer.named_buffers())[path], buffer, path)


async def test_arguments_and_results_of_all_kinds() -> None:
    module, layer = pair_of(Several)
    x, a, b, index = draw(3, 4), draw(3, 4, at=1), draw(4, at=2), np.array([2, 0])
    theirs = [torch.from_numpy(array.copy()).requires_grad_() for array in (x, a, b)]
    expected = module(theirs[0], {"a": theirs[1], "b": (theirs[2],)}, index=torch.from_numpy(index), factor=3.0)
    ours = [ag.tensor(array, requires_grad=True) for array in (x, a, b)]
    found = layer(ours[0], {"a": ours[1], "b": (ours[2],)}, index=index, factor=3.0)
    assert found.keys() == expected.keys() and type(found["rest"]) is tuple and found["rest"][2] is None and type(found["rest"][3]) is list
    numbers, outside = found["rest"][0], found["rest"][1]
    assert numbers.dtype == np.int64 and not numbers.requires_grad and not outside.requires_grad and outside.is_leaf
    (expected["picked"].sum() + expected["rest"][3][0].sum()).backward()
    await (found["picked"].sum() + found["rest"][3][0].sum()).backward()
    for mine, other in zip((*ours, *layer.parameters()), (*theirs, *module.parameters()), strict=True):
        assert_close(mine.grad.numpy(), other.grad.numpy())


@dataclasses.dataclass(frozen=True)
class Pair:
    first: Any
    name: str = "pair"
    rest: Any = None


class Named(dict[str, Any]):
    """A dict of a class of its own."""


CONTAINERS: dict[str, Any] = {
    "dataclass": lambda y: Pair(y, rest=[y * 2]), "deque": lambda y: deque([y, y * 2], maxlen=5), "set": lambda y: {y},
    "frozenset": lambda y: frozenset([y]), "ordered dict": lambda y: OrderedDict(a=y, b=(y * 3,)),
    "default dict": lambda y: defaultdict(list, a=[y]), "dict of a class": lambda y: Named(a=y, b=Pair(y)),
    "named tuple": lambda y: torch.max(y, dim=1)[:1],
}  # fmt: skip


class Returning(nn.Module):  # type: ignore[misc,name-defined]
    """Its result is in a container, and so may be its arguments."""

    def __init__(self, put: Any) -> None:
        super().__init__()
        self.linear, self.put = nn.Linear(4, 4), put

    def forward(self, x: Any) -> Any:
        return self.put(self.linear(nested_leaves(x, torch.Tensor)[0]))


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("takes", [False, True])
async def test_containers_of_all_kinds_keep_their_class_and_carry_gradients(name: str, takes: bool) -> None:
    put = CONTAINERS[name]
    module, layer = pair_of(lambda: Returning(put))
    expected = module(torch.from_numpy(draw(3, 4)))
    x = ag.asarray(draw(3, 4))
    found = layer(put(x) if takes and name != "named tuple" else x)
    assert type(found) is type(expected) and nested_leaves(found, torch.Tensor) == []
    tensors = nested_leaves(found, ag.Tensor)
    assert len(tensors) == len(nested_leaves(expected, torch.Tensor)) and all(tensor.requires_grad for tensor in tensors)
    if name == "deque":
        assert found.maxlen == 5
    if name == "dataclass":
        assert found.name == "pair"
    sum(tensor.sum() for tensor in nested_leaves(expected, torch.Tensor)).backward()
    await sum((tensor.sum() for tensor in tensors), ag.tensor(0.0)).backward()
    for ours, other in zip(layer.parameters(), module.parameters(), strict=True):
        assert_close(ours.grad.numpy(), other.grad.numpy())


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "named tuple"])
async def test_a_function_in_torch_takes_and_returns_containers(name: str) -> None:
    put = CONTAINERS[name]
    function = interop.function(lambda container: put(nested_leaves(container, ag.Tensor)[0] * 2.0))

    def train() -> Any:
        x = torch.from_numpy(draw(3, 4)).requires_grad_()
        found = function(put(x))
        assert type(found) is type(put(x)) and nested_leaves(found, ag.Tensor) == []
        sum(tensor.sum() for tensor in nested_leaves(found, torch.Tensor)).backward()
        return x.grad, sum(tensor.sum() for tensor in nested_leaves(put(torch.from_numpy(draw(3, 4)) * 2), torch.Tensor))

    grad, total = await asyncio.to_thread(train)
    assert_close((grad.numpy() * draw(3, 4)).sum(), total.numpy(), 100)


class Holder:
    """An object that no library enters."""

    __slots__ = ("value", "__dict__")

    def __init__(self, value: Any, hidden: Any = None) -> None:
        self.value, self.hidden = value, hidden


@pytest.mark.parametrize(
    "put",
    [Holder, lambda y: [Holder(None, {"a": [y]})], lambda y: torch.distributions.Normal(y, 1.0), lambda y: (each for each in [y])],
    ids=["slot", "attribute", "distribution", "generator"],
)
async def test_objects_that_keep_a_graph_of_torch_are_refused(put: Any) -> None:
    layer = interop.wrap(Returning(put))
    assert_raises(GraphError, r"gradients would stop here.*Return tensors in", lambda: layer(ag.asarray(draw(3, 4))))
    with ag.no_grad():
        layer(ag.asarray(draw(3, 4)))
    if put is Holder:
        scale = ag.tensor(2.0, requires_grad=True)
        function = interop.function(lambda x: (x, Holder(x * scale)))
        await assert_awaiting_raises(GraphError, "gradients would stop here", asyncio.to_thread(function, torch.ones(3)))


async def test_second_derivatives() -> None:
    compiled = ag.compile(lambda t: t.exp() * t)
    others = [compiled(ag.ones(3).requires_grad_()) for _ in range(3)]  # its nodes are in the process
    assert others
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Softplus()).double()
    layer = interop.wrap(module)
    x = ag.tensor(draw(5, 3, dtype=np.float64), requires_grad=True)
    assert await ag.gradcheck(layer, (x,))
    assert await ag.gradgradcheck(layer, (x,))
    names, values = zip(*layer.named_parameters(), strict=True)
    for check in (ag.gradcheck, ag.gradgradcheck):
        assert await check(lambda *given: ag.functional_call(layer, dict(zip(names, given, strict=True)), (x,)), values)
    parameters = list(layer.parameters())
    given = torch.from_numpy(x.detach().numpy()).requires_grad_()
    (g,) = torch.autograd.grad(module(given).sum(), given, create_graph=True)
    expected = torch.autograd.grad((g * g).sum(), [given, *module.parameters()], allow_unused=True)
    (ours,) = await ag.grad(layer(x).sum(), [x], create_graph=True)
    found = await ag.grad((ours * ours).sum(), [x, *parameters], allow_unused=True)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert_close(mine.numpy(), other.numpy())


async def test_a_wrapped_module_between_rows_and_another() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8), nn.Linear(8, 2)
    x = draw(3, 4)
    given = torch.from_numpy(x.copy()).requires_grad_()
    second(first(given).relu()).sum().backward()
    expected = [given.grad.clone(), *[p.grad.clone() for module in (first, second) for p in module.parameters()]]
    model = ag.nn.Sequential(interop.wrap(first), ag.nn.ReLU(), interop.wrap(second))
    model.zero_grad()
    ours = ag.tensor(x, requires_grad=True)
    await model(ours).sum().backward()
    for mine, other in zip((ours, *model.parameters()), expected, strict=True):
        same(mine.grad, other)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


async def test_forward_mode_goes_through_a_module_once() -> None:
    layer = interop.wrap(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    x, v = (ag.tensor(draw(2, 4).astype(np.float64)) for _ in range(2))

    def fn(x: Any) -> Any:
        return layer(x * x) * 2

    output, product = await ag.jvp(fn, x, v)
    ends = [fn(x + step * v).detach().numpy() for step in (-1e-5, 1e-5)]
    np.testing.assert_allclose(product.numpy(), (ends[1] - ends[0]) / 2e-5, rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(output.numpy(), fn(x).detach().numpy())

    async def gradient(x: Any) -> Any:
        return (await ag.value_and_grad(lambda x: fn(x).sum(), x))[1]

    await assert_awaiting_raises(ag.errors.NoRuleError, "goes through another library's modules once", ag.jvp(gradient, x, v))


#: arguments that PyTorch has given up or keeps for itself
INTERNAL = {"_stacklevel"}


def test_the_guide_names_every_argument_of_pytorch_that_is_not_there() -> None:
    text = (Path(__file__).parents[2] / "docs/guides/port-from-pytorch.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", text.partition("### Arguments that are not there\n")[2])) | INTERNAL
    places = ((torch.nn, ag.nn), (torch.nn.functional, ag.nn.functional), (torch.optim, ag.optim), (torch.optim.lr_scheduler, ag.optim.lr_scheduler))
    compared, missing = 0, []
    for theirs, ours in places:
        for name in set(dir(theirs)) & {each for each in dir(ours) if not each.startswith("_")}:
            try:
                wanted, found = (inspect.signature(getattr(place, name)).parameters for place in (theirs, ours))
            except (TypeError, ValueError):
                continue  # a module, or a function without a signature
            if not any(each.kind is each.VAR_KEYWORD for each in found.values()):
                compared += 1
                kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
                missing += [f"{name}({each})" for each in wanted.keys() - found.keys() - named if wanted[each].kind not in kinds]
    assert compared > 100 and not missing, missing


async def test_matrices_of_derivatives_are_those_of_torch_and_vmap_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    layer, x = interop.wrap(module), draw(2, 3).astype(np.float64)
    wanted = torch.autograd.functional.jacobian(module, torch.tensor(x)).numpy()
    for transform in (ag.jacfwd, ag.jacrev, ag.jacobian):
        assert_close((await transform(layer, ag.tensor(x))).numpy(), wanted)
    second = torch.autograd.functional.hessian(lambda x: module(x).sum(), torch.tensor(x)).numpy()
    assert_close((await ag.hessian(lambda x: layer(x).sum(), ag.tensor(x))).numpy(), second)
    assert_raises(ag.errors.NoRuleError, "whole batch", lambda: ag.vmap(layer)(ag.tensor(x)))
