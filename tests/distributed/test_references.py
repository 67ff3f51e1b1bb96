"""Remote references: objects that live on other workers, who may use them, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.objects.reference_table import ReferenceTable
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import (
    ArgumentTypeError,
    NoContextError,
    NotExposedError,
    Overloaded,
    ProtocolError,
    ReferenceLostError,
    RemoteError,
)
from tests.distributed.memory import Switchboard
from tests.distributed.workers import SECRET, context_here, leaf, settled, two_principals, until, values, view, workers
from tests.support import cancel

service = dist.Service()


@service.reference
class Layer:
    def __init__(self, *factors: float, name: str = "layer") -> None:
        if name == "bad":
            raise ValueError("a bad name")
        self.weight = leaf(*factors)
        self.name = name
        self.calls = 0

    def scale(self, x: ag.Tensor, power: int = 1) -> ag.Tensor:
        self.calls += 1
        return x * self.weight**power

    async def scale_later(self, x: ag.Tensor) -> ag.Tensor:
        await asyncio.sleep(0)
        return x * self.weight

    def whole(self) -> Layer:
        return self

    def grad(self) -> Any:
        return context_here().grads[self.weight]

    def complain(self) -> None:
        raise TypeError("my own")

    async def forever(self) -> None:
        await asyncio.Event().wait()


@service.reference
class Waits:
    async def __call__(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return x * 2


@service.function
async def make_layer(*factors: float) -> dist.RemoteRef:
    return dist.current_worker().refer(Layer(*factors))  # type: ignore[no-any-return]


@service.function
async def refer(value: Any) -> dist.RemoteRef:
    return dist.current_worker().refer(value)  # type: ignore[no-any-return]


@service.function
async def use(layer: dist.RemoteRef, x: ag.Tensor) -> ag.Tensor:
    return await layer.call("scale", x)  # type: ignore[no-any-return]


@service.function
async def name_of(layer: dist.RemoteRef) -> str:
    return layer.local_value().name  # type: ignore[no-any-return]


# -------------------------------------------------------------------- making and using


async def test_an_object_is_made_used_and_deleted_where_it_lives() -> None:
    async with workers("a", "b", service=service) as (a, b):
        layer = await a.remote("b", Layer, 2.0, 3.0, name="first")
        assert (layer.owner, layer.type_name, layer.epoch) == ("b", "Layer", b.endpoint.incarnation) and len(layer.key) == 16
        assert repr(layer) == f"<RemoteRef to Layer {layer.key.hex()[:8]} on b>"
        assert values(await layer.call("scale", ag.tensor([1.0, 1.0]))) == [2, 3]
        assert values(await layer.call("scale", ag.tensor([1.0, 1.0]), power=2)) == [4, 9]
        assert values(await layer.call("scale_later", ag.tensor([1.0, 1.0]))) == [2, 3]
        other = await a.remote("b", "Layer", 5.0)
        assert other != layer and b.statistics().references == 2
        assert await layer.delete() is True and await layer.delete() is False
        for use in (layer.call("scale", ag.tensor([1.0])), layer.get()):
            with pytest.raises(ReferenceLostError, match="Error on Node b: worker b has no object behind this reference"):
                await use
        assert values(await other.call("scale", ag.tensor([1.0]))) == [5] and b.statistics().references == 1


async def test_methods_are_differentiable() -> None:
    async with workers("a", "b", service=service) as (a, b):
        layer = await a.remote("b", Layer, 2.0, 3.0)
        async with a.context() as ctx:
            x = leaf(1, 4)
            y = await layer.call("scale", x)
            await ctx.backward((y * y).sum())
            assert values(ctx.grads[x]) == [8, 72]
            assert values(await layer.call("grad")) == [4, 96]
            assert [values(grad) for grad in view(b, ctx).grads.values()] == [[4, 96]]
        with pytest.raises(NoContextError, match=r"calling Layer\.scale on b with arguments that require grad"):
            await layer.call("scale", leaf(1, 4))


async def test_an_object_whose_call_is_a_coroutine() -> None:
    async with workers("a", "b", service=service) as (a, _):
        waits = await a.remote("b", Waits)
        assert await waits.call("__call__", 3) == 6


async def test_tensors_behind_references_are_fetched_with_their_gradients() -> None:
    async with workers("a", "b", service=service) as (a, b):
        weight = leaf(2, 3)
        ref = b.refer(weight)
        there = await a.call("b", "refer", ag.tensor([7.0]))
        assert values(await there.get()) == [7] and values(b.refer(weight).local_value()) == [2, 3]
        received = await _handed_over(b, a, ref)
        async with a.context() as ctx:
            w = await received.get()
            await ctx.backward((w * w).sum())
            assert values(view(b, ctx).grads[weight]) == [4, 6] and weight.grad is None
        plain = await received.get()
        assert values(plain) == [2, 3] and not plain.requires_grad


async def _handed_over(giver: dist.Worker, taker: dist.Worker, ref: Any) -> Any:
    """A reference as another worker has it after it was sent there."""
    got: list[Any] = []
    own = dist.Service()
    own.function("take")(got.append)
    before, taker._core.service = taker._core.service, own
    await giver.call(taker.name, "take", ref)
    taker._core.service = before
    return got[0]


async def test_references_are_sent_to_others_and_used_from_there() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, _):
        layer = await a.remote("b", Layer, 2.0, name="mine")
        async with a.context() as ctx:
            x = leaf(3)
            for user in ("c", "b", "a"):  # a third worker, the owner itself, and back to oneself
                y = await a.call(user, "use", layer, x)
                assert values(y) == [6]
                await ctx.backward(y.sum())
            assert values(ctx.grads[x]) == [6] and [values(g) for g in view(b, ctx).grads.values()] == [[9]]
        assert await a.call("b", "name_of", layer) == "mine"
        with pytest.raises(ReferenceLostError, match=r"the object behind <RemoteRef to Layer .* on b> lives on b, not on c: use `await ref.call"):
            await a.call("c", "name_of", layer)
        assert await a.call("b", "name_of", await _handed_over(a, b, layer)) == "mine"


async def test_an_object_made_by_a_function_has_the_methods_of_its_class_if_that_is_exposed() -> None:
    async with workers("a", "b", service=service) as (a, _):
        layer = await a.call("b", "make_layer", 2.0)
        assert values(await layer.call("scale", ag.tensor([4.0]))) == [8]
        plain = await a.call("b", "refer", [1, 2, 3])
        assert await plain.get() == [1, 2, 3]
        with pytest.raises(NotExposedError, match=r"<RemoteRef to list .* on b> has no methods that others may call: its class is not exposed"):
            await plain.call("append", 4)


async def test_references_to_objects_of_this_worker() -> None:
    async with workers("a", "b", service=service) as (a, _):
        layer = await a.remote("a", Layer, 2.0)
        assert values(await layer.call("scale", ag.tensor([4.0]))) == [8] and layer.local_value().calls == 1
        ref = a.refer("text")
        assert ref.local_value() == "text" and await ref.get() == "text" and a.statistics().references == 2
        await ref.delete()
        with pytest.raises(ReferenceLostError):
            ref.local_value()


# -------------------------------------------------------------------- errors


async def test_what_cannot_be_made_or_called() -> None:
    async with workers("a", "b", service=service) as (a, b):
        for make, error, text in (
            (lambda: a.remote("b", "Nothing"), NotExposedError, "no class 'Nothing' is exposed"),
            (lambda: a.remote("b", 3), ArgumentTypeError, "expected a class .*, or its name, found int"),  # type: ignore[arg-type]
            (lambda: a.remote("b", Switchboard), NotExposedError, "no class 'Switchboard' is exposed"),
            (lambda: a.remote("b", Layer, "x"), RemoteError, "b: Layer: ArgumentTypeError: calling Layer: argument 'factors' is str; expected float"),
            (lambda: a.remote("b", Layer, colour=1), RemoteError, "got an unexpected keyword argument 'colour'"),
            (lambda: a.remote("b", Layer, name="bad"), RemoteError, "Error on Node b: Layer: ValueError: a bad name"),
            (lambda: a.remote("b", Layer, {1}), ArgumentTypeError, "calling Layer on b: argument 0 has type set"),
        ):
            with pytest.raises(error, match=text):
                await make()
        assert b.statistics().references == 0
        layer = await a.remote("b", Layer, 1.0)
        for method, args, error, text in (
            ("nothing", (), NotExposedError, "Layer has no public method 'nothing'"),
            ("__init__", (), NotExposedError, "no public method '__init__'"),
            ("weight", (), NotExposedError, "no public method 'weight'"),
            ("scale", (), RemoteError, "calling Layer.scale.*: missing a required argument: 'x'"),
            ("scale", (3,), RemoteError, "calling Layer.scale: argument 'x' is int; expected Tensor"),
            ("scale", ({3},), ArgumentTypeError, "calling Layer.scale on b: argument 0 has type set"),
            ("complain", (), RemoteError, "^Error on Node b: Layer.complain: TypeError: my own$"),
            ("whole", (), RemoteError, "sending a result: it has type .*Layer"),
        ):
            with pytest.raises(error, match=text):
                await layer.call(method, *args)
        with pytest.raises(RemoteError, match=r"sending a result: it has type .*Layer; .*keep it on its worker"):
            await layer.get()
        with pytest.raises(RemoteError) as caught:
            await layer.call("complain")
        assert (caught.value.function, caught.value.type_name) == ("Layer.complain", "TypeError")
        assert values(await layer.call("scale", ag.tensor([3.0]))) == [3]


async def test_cancelling_a_method_cancels_it_where_it_runs() -> None:
    async with workers("a", "b", service=service) as (a, b):
        layer = await a.remote("b", Layer, 1.0)
        call = asyncio.ensure_future(layer.call("forever"))
        await until(lambda: any(peer.running for peer in b.statistics().peers))
        await cancel(call)
        await settled(a, b)


async def test_a_reference_to_an_object_of_a_worker_that_was_restarted_is_lost() -> None:
    board = Switchboard()
    async with workers("a", service=service, board=board) as (a,):
        async with dist.Worker("b", service=service, secret=SECRET, transport=board.transport("b")) as b:
            a.add_peer("b", b.url)
            layer = await a.remote("b", Layer, 1.0)
        async with dist.Worker("b", service=service, secret=SECRET, transport=board.transport("b")) as b:
            for use in (layer.call("scale", ag.tensor([1.0])), layer.get()):
                with pytest.raises(ReferenceLostError, match="Error on Node b: worker b has been restarted since this reference was made"):
                    await use
            assert await layer.delete() is False


async def test_objects_belong_to_the_principal_that_had_them_made() -> None:
    server, tenant = two_principals()
    async with workers("a", "b", "x", service=service, secrets={"b": server, "x": tenant}) as (a, b, x):
        mine = await a.remote("b", Layer, 1.0, name="of a")
        own = b.refer("of b itself")
        stolen = [x._calls.reference(ref.to_wire()) for ref in (mine, own)]
        for ref in stolen:
            for attempt in (ref.call("scale", ag.tensor([1.0])), ref.get(), x.call("b", "name_of", ref), x.call("b", "use", ref, ag.tensor([1.0]))):
                with pytest.raises(ReferenceLostError, match="no object behind this reference"):
                    await attempt
            assert await ref.delete() is False
        assert b.statistics().references == 2
        assert await a.call("b", "name_of", mine) == "of a"
        theirs = await x.remote("b", Layer, 2.0, name="of x")
        assert await x.call("b", "name_of", theirs) == "of x", "the function acts for whom it serves"
        made = await x.call("b", "make_layer", 3.0)
        assert values(await made.call("scale", ag.tensor([2.0]))) == [6], "what it makes for x belongs to x"
        with pytest.raises(ReferenceLostError):
            await a._calls.reference(made.to_wire()).call("scale", ag.tensor([1.0]))


async def test_objects_are_limited_per_principal() -> None:
    async with workers("a", "b", service=service, limits=Limits(references_per_principal=2)) as (a, b):
        first, _ = [await a.remote("b", Layer, 1.0) for _ in range(2)]
        with pytest.raises(Overloaded, match="worker b holds 2 objects for this principal already"):
            await a.remote("b", Layer, 1.0)
        await first.delete()
        await a.remote("b", Layer, 1.0)
        assert b.statistics().references == 2


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("aiograd.reference.create", [3, [], {}]),
        ("aiograd.reference.create", ["Layer", (), {}]),
        ("aiograd.reference.create", ["Layer"]),
        ("aiograd.reference.call", ["ref", 3, [], {}]),
        ("aiograd.reference.call", ["ref", "scale", [], []]),
        ("aiograd.reference.call", [3, "scale", [], {}]),
        ("aiograd.reference.call", []),
        ("aiograd.reference.get", [None]),
        ("aiograd.reference.delete", ["x"]),
        ("aiograd.module.parameters", ["ref"]),
        ("aiograd.module.state_dict", ["ref", 1]),
        ("aiograd.module.load_state_dict", ["ref", 1]),
        ("aiograd.module.train", ["ref", "x"]),
        ("aiograd.optimizer.create", ["SGD", ["ref"], {}]),
        ("aiograd.optimizer.create", ["SGD", [3], {}]),
        ("aiograd.optimizer.create", ["Layer", [], {"factors": 1}]),
        ("aiograd.optimizer.create", [3, [], {}]),
        ("aiograd.optimizer.step", ["ref", 1]),
        ("aiograd.optimizer.step", ["ref", "1"]),
        ("aiograd.optimizer.state_dict", ["ref"]),
        ("aiograd.optimizer.load_state_dict", ["ref", b"n" * 16, True, [], {}]),
        ("aiograd.module.state_dict", ["ref", b"n" * 16, (0, 1, 1)]),
        ("aiograd.module.load_state_dict", ["ref", b"n" * 16, True, 3]),
        ("aiograd.transfer.put", ["ref", b"n" * 16, True, 3]),
        ("aiograd.transfer.put", [3, b"n" * 16, True, []]),
        ("aiograd.transfer.more", ["ref", b"n"]),
    ],
)
async def test_the_librarys_own_functions_refuse_what_the_library_does_not_send(function: str, args: list[Any]) -> None:
    async with workers("a", "b", service=service) as (a, b):
        layer = await a.remote("b", Layer, 1.0)
        args = [layer if arg == "ref" else arg for arg in args]
        with pytest.raises((RemoteError, ProtocolError)) as caught:
            await a._calls.call("b", function, args, {}, None)
        if isinstance(caught.value, RemoteError):
            assert caught.value.type_name in ("ArgumentTypeError", "ArgumentError", "NoContextError"), caught.value
        else:
            assert f"a malformed {function}: " in str(caught.value)
        assert b.statistics().references == 1


# -------------------------------------------------------------------- the table by itself


def test_the_table_of_references() -> None:
    drawn = iter(range(100))
    table = ReferenceTable("b", b"e" * 16, lambda count: next(drawn).to_bytes(count, "big"), 2)
    first = table.add("x", None, "p", "a")
    assert first.type_name == "str" and table.find(first.id, first.epoch, "p").value == "x" and len(table) == 1
    for key, epoch, principal in ((first.id, b"f" * 16, "p"), (b"?" * 16, first.epoch, "p"), (first.id, first.epoch, "q")):
        with pytest.raises(ReferenceLostError):
            table.find(key, epoch, principal)
        assert not table.remove(key, epoch, principal)
    texts = set()
    for key, principal in ((b"?" * 16, "p"), (first.id, "q")):
        with pytest.raises(ReferenceLostError) as caught:
            table.find(key, first.epoch, principal)
        texts.add(str(caught.value))
    assert len(texts) == 1, "somebody else's object looks like none"
    value = [1]
    shared = table.share(value, "p", "a")
    assert table.share(value, "p", "a") == shared and table.share(value, "q", "a") != shared
    with pytest.raises(Overloaded):
        table.add("y", None, "p", "a")
    assert table.remove(shared.id, shared.epoch, "p") and table.share(value, "p", "a") != shared
    assert table.remove(first.id, first.epoch, "p") and table.add("y", None, "p", "a")
    table.clear()
    assert not len(table) and table.add("y", None, "p", "a")
