"""Pipelines whose stages give values past their neighbours, take arguments of the batch anywhere, have losses of their own, and change shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.coordination.message_form import parse
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError, ProtocolError, ShapeError
from aiograd.pipeline import Pipeline, Stage, make_schedule
from aiograd.pipeline.run import stage_ranks
from aiograd.pipeline.run.messages import RankValue, received
from aiograd.pipeline.run.stage_assignment import StageAssignment
from tests.distributed.workers import workers
from tests.pipeline.models import SIZE, blocks, data, gradients, mean_square, schedule, values
from tests.pipeline.remote import behind, service
from tests.pipeline.unusual import KINDS, TopWithLoss, alone, arguments, model, modules, place, stages

#: both stages of a rank are no neighbours, and the third one's backward is split
CROSSED = schedule("0F0 2F0 0F1 2F1 2I0 2W0 0B0 2I1 2W1 0B1 / 1F0 3F0 3B0 1F1 3F1 3B1 1I0 1I1 1W1 1W0")


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("where", ["loop", "executor"])
async def test_values_past_neighbours_have_the_bits_of_one_graph(name: str, where: str) -> None:
    x, target = data(7)
    serial, cut = modules(), modules()
    losses = await alone(serial, 4, x, target, **arguments(7))
    async with Pipeline(stages(cut, where=where), make_schedule(name, 4, 4), loss_fn=mean_square) as pipe:
        assert values(await pipe.step(x, target, **arguments(7))) == losses
        assert gradients(cut) == gradients(serial)
        with ag.no_grad():
            expected, _ = model(serial, x, None, 0.75, arguments(7)["mask"])
        given = {key: value for key, value in arguments(7).items() if key != "labels"}
        assert np.allclose((await pipe.eval(x, **given)).numpy(), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "ZBV", "V-Min", "DualPipeV"])
async def test_several_stages_of_a_rank(name: str) -> None:
    x, target = data(9)
    serial, cut = modules(), modules()
    losses = await alone(serial, 4, x, target, **arguments(9))
    async with Pipeline(stages(cut), make_schedule(name, 2, 4, 2), loss_fn=mean_square) as pipe:
        assert values(await pipe.step(x, target, **arguments(9))) == losses
    assert gradients(cut) == gradients(serial)


async def test_a_schedule_of_ones_own() -> None:
    x, target = data(6)
    serial, cut = modules(), modules()
    losses = await alone(serial, 2, x, target, **arguments(6))
    async with Pipeline(stages(cut), CROSSED, loss_fn=mean_square) as pipe:
        assert values(await pipe.step(x, target, **arguments(6))) == losses
    assert gradients(cut) == gradients(serial)


@pytest.mark.parametrize("homes", ["abcd", "ab.d", ".bc.", "aaaa"])
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
async def test_over_workers(homes: str, name: str) -> None:
    x, target = data(7)
    serial = modules()
    losses = await alone(serial, 4, x, target, **arguments(7))
    async with workers("driver", *"abcd", service=service) as opened:
        cut = await place(opened[0], [None if home == "." else home for home in homes])
        async with Pipeline(stages(cut), make_schedule(name, 4, 4), loss_fn=mean_square, worker=opened[0]) as pipe:
            for times in range(2):
                assert values(await pipe.step(x, target, **arguments(7))) == losses
                assert gradients(behind(each, *opened) for each in cut) == gradients(serial)
                if not times:
                    await alone(serial, 4, x, target, **arguments(7))
            assert (await pipe.eval(x, mask=arguments(7)["mask"])).shape == (7, SIZE)


async def test_values_go_straight_to_the_stage_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker between the two sees them, in either direction."""
    seen: list[tuple[int, str, int]] = []
    losses: list[str] = []
    put = stage_ranks.StageRanks.put

    def noted(self: Any, work: Any, sent: RankValue) -> None:
        seen.append((sent.rank, sent.kind, sent.stage))
        if sent.kind.startswith("given"):
            losses.extend(name for name in sent.value[0] if name == "loss")
        put(self, work, sent)

    monkeypatch.setattr(stage_ranks.StageRanks, "put", noted)
    x, target = data(4)
    async with workers("driver", *"abcd", service=service) as opened:
        cut = await place(opened[0], "abcd", (*KINDS[:3], TopWithLoss))
        async with Pipeline(stages(cut), make_schedule("1F1B", 4, 4)) as pipe:
            await pipe.step(x, target, **arguments(4))
            in_the_step, counted = len(losses), list(seen)
            await pipe.eval(x, scale=1.0)
    assert in_the_step == len(losses) == 8, "evaluations send none"
    seen = counted
    given = {each for each in seen if " " in each[1]}
    assert given == {
        (2, "given 0", 2), (3, "given 0", 3), (2, "given 1", 2), (3, "given 1", 3), (3, "given 2", 3),
        (0, "returned 2", 0), (0, "returned 3", 0), (1, "returned 2", 1), (1, "returned 3", 1), (2, "returned 3", 2),
    }  # fmt: skip
    assert len([each for each in seen if " " in each[1]]) == 4 * len(given)  # each once for each microbatch
    assert {each for each in seen if each[1] == "entry"} == {(0, "entry", 0), (1, "entry", 1), (3, "entry", 3)}


async def test_shapes_and_dtypes_change_from_microbatch_to_microbatch() -> None:
    """Microbatches of different lengths, one of them in another precision, and one with nothing to skip."""
    rng = np.random.default_rng(0)
    shapes = [((3, SIZE), np.float32), ((1, 4, SIZE), np.float32), ((0, SIZE), np.float32), ((2, SIZE), np.float64)]
    parts = [ag.tensor(rng.normal(size=shape).astype(dtype)) for shape, dtype in shapes]

    def cut(middle: Any, x: Any) -> Any:
        return middle(x), x if x.ndim == 3 else None

    def sum_up(x: Any, target: Any) -> Any:
        return (x * target).sum()

    async def run(homes: str, opened: Any) -> tuple[list[float], list[Any]]:
        first, second, third = blocks(3)
        left = Stage(lambda x: cut(first, x), gives=("skipped",), parameters=first.parameters())
        right = Stage(lambda x, skipped: third(x if skipped is None else x + skipped), takes=("skipped",), parameters=third.parameters())
        middle: Any = second
        if homes == "a":
            middle = await opened[0].remote_module("a", "Block", 1)
        async with Pipeline([left, middle, right], make_schedule("ZB-H1", 3, 4), loss_fn=sum_up, worker=opened[0] if opened else None) as pipe:
            losses = await pipe.step(arg_mbs=[(part,) for part in parts], target_mbs=parts)
        return values(losses), gradients([first, behind(middle, *opened), third])

    first, second, third = blocks(3)
    expected = []
    for part in parts:
        y, skipped = cut(first, part)
        y = second(y)
        loss = sum_up(third(y if skipped is None else y + skipped), part)
        await loss.backward(ag.tensor(np.full((), 0.25, loss.dtype)))
        expected.append(loss.item())
    assert await run("", ()) == (expected, gradients([first, second, third]))
    async with workers("driver", "a", service=service) as opened:
        assert await run("a", opened) == (expected, gradients([first, second, third]))


async def test_arguments_of_a_later_stage_that_require_grad() -> None:
    prompt = ag.tensor(np.ones(SIZE, np.float32), requires_grad=True)
    first, second = blocks(2)
    stage = Stage(lambda x, prompt: second(x + prompt), takes=("prompt",), parameters=second.parameters())
    x, target = data(4)
    async with Pipeline([first, stage], make_schedule("1F1B", 2, 2), loss_fn=mean_square) as pipe:
        await pipe.step(arg_mbs=[(x[:2],), (x[2:],)], kwarg_mbs=[{"prompt": prompt}] * 2, target_mbs=[target[:2], target[2:]])
    expected = ag.tensor(np.ones(SIZE, np.float32), requires_grad=True)
    one, two = blocks(2)
    for part, wanted in ((x[:2], target[:2]), (x[2:], target[2:])):
        await mean_square(two(one(part) + expected), wanted).backward(ag.tensor(np.float32(0.5)))
    assert prompt.grad.numpy().tobytes() == expected.grad.numpy().tobytes()
    assert gradients([first, second]) == gradients([one, two])


async def test_arguments_for_another_worker_cannot_require_grad() -> None:
    prompt = ag.tensor(np.ones(SIZE, np.float32), requires_grad=True)
    async with workers("driver", *"abcd", service=service) as opened:
        async with Pipeline(stages(await place(opened[0], "abcd")), make_schedule("1F1B", 4, 4), loss_fn=mean_square, worker=opened[0]) as pipe:
            with pytest.raises(ArgumentError, match="requires grad, and its stage is on another worker"):
                await pipe.step(*data(4), **arguments(4) | {"mask": prompt})


async def test_a_failed_step_changes_nothing_and_says_where() -> None:
    x, target = data(4)
    cut = modules()
    async with Pipeline(stages(cut), make_schedule("1F1B", 4, 4), loss_fn=mean_square) as pipe:
        with pytest.raises(PipelineError, match=r"action 3F0 failed \(stage 3, microbatch 0, rank 3\)"):
            await pipe.step(x, target, **arguments(4) | {"mask": "ones"})
        assert all(each is None for each in gradients(cut))
        await pipe.step(x, target, **arguments(4))
    assert all(each is not None for each in gradients(cut))


@pytest.mark.parametrize(
    ("returned", "error", "what"),
    [
        (lambda x: x, ArgumentTypeError, "stage 0 .* gives 'skipped', 'loss': expected a tuple of its output and 2 more, found a Tensor"),
        (lambda x: (x, x), ArgumentTypeError, "expected a tuple of its output and 2 more, found a tuple of 2"),
        (lambda x: (x, x, 1.0), ArgumentTypeError, "gives a loss, and it is a float; expected a real Tensor of one element, or None"),
        (lambda x: (x, x, x), ShapeError, r"gives a loss of shape \[1, 5\]; expected a Tensor of one element"),
        (lambda x: (x, x, (x > 0).sum()), ArgumentTypeError, "gives a loss, and it is dtype int64"),
    ],
)
async def test_values_that_are_not_given(returned: Any, error: type[Exception], what: str) -> None:
    given = [Stage(returned, gives=("skipped", "loss")), lambda x: x, Stage(lambda x, skipped: x + skipped, takes=("skipped",))]
    async with Pipeline(given, make_schedule("1F1B", 3, 3), loss_fn=mean_square) as pipe:
        with pytest.raises(PipelineError, match=what) as raised:
            await pipe.step(*data(3))
    assert isinstance(raised.value.__cause__, error)


def _wrong() -> Iterator[tuple[list[Any], str]]:
    def plain(x: Any) -> Any:
        return x

    giving, taking = Stage(plain, gives=("skipped",)), Stage(plain, takes=("skipped",))
    yield [giving, plain, plain], "stage 0 gives 'skipped', and no stage takes it; expected a later stage with 'skipped' among its `takes`"
    yield [taking, giving, plain], "stage 1 gives 'skipped', and stage 0 takes it, which comes no later"
    yield [plain, Stage(plain, gives=("skipped",), takes=("skipped",)), taking], "stage 1 takes it, which comes no later"
    yield [giving, giving, taking], "stages 0 and 1 both give 'skipped'; give their values different names"


@pytest.mark.parametrize(("given", "what"), list(_wrong()))
def test_stages_that_do_not_fit(given: list[Any], what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        Pipeline(given, make_schedule("1F1B", 3, 3), loss_fn=mean_square)


def test_names_that_cannot_be() -> None:
    for options, error, what in (
        ({"gives": "skipped"}, ArgumentTypeError, r"Stage\(gives='skipped'\): expected a tuple of names"),
        ({"takes": ("a b",)}, ArgumentTypeError, "expected a tuple of names"),
        ({"takes": (1,)}, ArgumentTypeError, "expected a tuple of names"),
        ({"takes": 1}, ArgumentTypeError, "expected a tuple of names"),
        ({"parameters": 1}, ArgumentTypeError, "expected a list of leaf Tensors, found int"),
        ({"takes": ("a", "a")}, ArgumentError, "'a' occurs twice"),
        ({"takes": ("loss",)}, ArgumentError, "'loss' is reserved"),
        ({"gives": ("mb_idx",)}, ArgumentError, "'mb_idx' is reserved"),
    ):
        with pytest.raises(error, match=what):
            Stage(len, **options)  # type: ignore[arg-type]


async def test_losses_where_they_cannot_be() -> None:
    last = Stage(lambda x, target=None: (x, x.sum()), gives=("loss",))
    with pytest.raises(ArgumentError, match="stage 1 gives 'loss', and without loss_fn the last stage returns the loss itself; add it there"):
        Pipeline([blocks(1)[0], last], make_schedule("1F1B", 2, 2))
    first, second = blocks(2)
    x, target = data(4)
    stage = Stage(lambda x: (second(x), (second[0].weight ** 2).sum()), gives=("loss",), parameters=second.parameters())
    async with Pipeline([first, stage], make_schedule("1F1B", 2, 2), loss_fn=mean_square) as pipe:
        losses = await pipe.step(x, target)
    one, two = blocks(2)
    expected = []
    for part, wanted in ((x[:2], target[:2]), (x[2:], target[2:])):
        loss = mean_square(two(one(part)), wanted) + (two[0].weight ** 2).sum()
        await loss.backward(ag.tensor(np.float32(0.5)))
        expected.append(loss.item())
    assert values(losses) == expected and gradients([first, second]) == gradients([one, two])


async def test_gradients_from_several_stages_are_added_up_as_in_one_graph() -> None:
    """From the last stage to the first: every other order gives other bits here."""
    rng = np.random.default_rng(5)
    factors = [ag.tensor(rng.normal(size=(SIZE, SIZE)).astype(np.float32) * 10.0**power) for power in (0, 1, -1, 2)]
    (first,) = blocks(1)
    last = [Stage(lambda h, y, f=f: (h if h.ndim else 0) + (y @ f).sum(), takes=("y",)) for f in factors[1:]]
    cut = [Stage(lambda x: (lambda y: (y, y))(first(x)), gives=("y",), parameters=first.parameters()), lambda y: (y @ factors[0]).sum()[None], *last]
    x, _ = data(4)
    async with Pipeline(cut, make_schedule("1F1B", 5, 5), loss_fn=lambda y, target: y.sum()) as pipe:
        await pipe.step(arg_mbs=[(x,)] * 5, target_mbs=[None] * 5)
    (one,) = blocks(1)
    for _ in range(5):
        y = one(x)
        h = (y @ factors[0]).sum()[None]
        for factor in factors[1:]:
            h = h + (y @ factor).sum()
        await h.sum().backward(ag.tensor(np.float32(0.2)))
    assert gradients([first]) == gradients([one])


async def test_an_argument_with_the_name_of_a_value() -> None:
    async with Pipeline(stages(modules()), make_schedule("1F1B", 4, 4), loss_fn=mean_square) as pipe:
        with pytest.raises(ArgumentError, match="an argument 'features' of a batch, and stage 2 takes what stage 0 gives by this name; leave it out"):
            await pipe.step(*data(4), features=1)


def test_replicas_have_to_pass_on_the_same() -> None:
    assignment = StageAssignment(dict(enumerate(stages(modules()))), {}, {}, (0, 1, 2, 3), 4, 3, 3, mean_square, 1.0, False).linked()
    plain = {index: Stage(module) for index, module in enumerate(modules())}
    assert assignment.numbered(1, plain).links == assignment.links
    with pytest.raises(ArgumentError, match="give and take other values than those of the first one"):
        assignment.numbered(1, plain | {0: Stage(plain[0].module, gives=("features",)), 3: Stage(plain[3].module, takes=("features",))})


def test_values_from_elsewhere_are_checked() -> None:
    x = ag.tensor([1.0])
    assert received("given 0", ({"a": x}, (False,))).values == {"a": x} and received("returned 3", [x]) == [x]
    for kind, value in (("given 0", [x]), ("given 0", ({"a": x},)), ("returned 0", (x,))):
        with pytest.raises(ProtocolError, match="malformed"):
            received(kind, value)
    for kind in ("given", "given x", "given -1", "forward 0", "returned ", "other 0"):
        with pytest.raises(ProtocolError, match="malformed RankValue"):
            _parsed(kind, x)
    assert _parsed("given 12", x).kind == "given 12"
    with pytest.raises(ArgumentError, match="'a' from stage 2 to stage 1; expected a later stage, below 4"):
        wire = StageAssignment(dict(enumerate(stages(modules()))), {}, {}, (0, 1, 2, 3), 4, 3, 3, None, 1.0, False).to_wire()
        StageAssignment.parse(modules(), wire | {"absorbs": None, "links": [("a", 2, 1)]})


def _parsed(kind: str, value: Any) -> RankValue:
    return parse(RankValue, (1, 0, kind, 0, 0, value))
