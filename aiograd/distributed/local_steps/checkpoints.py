"""Checkpoints of a training with local steps: the state that all members share, as a dict that can be saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aiograd.coordination.message_form import encode, parse
from aiograd.data.ledger import BatchLedger, BatchPlace
from aiograd.distributed.local_steps.base_coordinator import copies
from aiograd.distributed.local_steps.base_state import BaseState
from aiograd.distributed.local_steps.coordinator import RoundCoordinator
from aiograd.distributed.local_steps.remote_local_member import RemoteContribution
from aiograd.distributed.local_steps.round_messages import ChangedBuffer, LocalResult, MemberProgress
from aiograd.distributed.messages.library import LoadModule, ReadModule, ReadOptimizer
from aiograd.distributed.objects.parameter_stream import fetch, store, store_optimizer
from aiograd.errors import ArgumentError, ModeError, ProtocolError
from aiograd.running.offloading import offload
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make

#: the parts of a checkpoint
PARTS = ("version", "seed", "parameters", "buffers", "outer", "answer", "data", "order")


async def checkpoint_of(coordinator: RoundCoordinator) -> dict[str, Any]:
    """The checkpoint of a training, of which no round is under way.

    Args:
        coordinator: of the training.

    Returns:
        Copies of arrays as Tensors, numbers, texts, and dicts and lists of them.
    """
    base, loader = coordinator.base, coordinator.outline.loader
    residuals = {path: each for path, each in zip(base.trained, coordinator.residuals, strict=False) if each is not None}
    data, seed = coordinator.ledger.state_dict(), list(coordinator.seed)
    values, outer = await offload(copies, base.values(), base.outer.state_dict())
    answer, _ = await offload(copies, residuals, None)
    tensors = {path: make(each) for path, each in values.items()}
    return {
        "version": base.version,
        "seed": seed,
        "parameters": {path: tensors[path] for path in base.parameters},
        "buffers": {path: tensors[path] for path in base.buffers},
        "outer": {name: _by_text(value) for name, value in outer.items()},
        "answer": {path: make(each) for path, each in answer.items()},
        "data": data,
        "order": {name: getattr(loader, name) for name in loader.form.names},
    }


def restored(coordinator: RoundCoordinator, state: Any) -> tuple[BaseState, str, BatchLedger, tuple[int, ...], list[Array | None]]:
    """The state of a checkpoint, checked against the training that is to go on from it.

    Args:
        coordinator: of the training, which is not changed.
        state: a checkpoint.

    Returns:
        The base, its digest, the place in the data with the batches of contributions handed out, the seed of random numbers, and the residuals
        of answers.

    Raises:
        ArgumentError: it is no checkpoint of this model and this data set.
    """
    if not isinstance(state, Mapping) or state.keys() - {"members"} != set(PARTS):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(f"LocalSteps.restore: expected a state with {', '.join(PARTS)}, as checkpoint() returns it; found {found}")
    base, loader = coordinator.base, coordinator.outline.loader
    parameters = _arrays("parameters", state["parameters"], {path: each._data for path, each in base.parameters.items()})
    buffers = _arrays("buffers", state["buffers"], base.buffers)
    sums = {path: each._data.astype(np.float64) for path, each in base.parameters.items() if path in base.trained}
    answer = _arrays("residuals of answers", state["answer"], sums) if state["answer"] else {}
    order = state["order"]
    for name in loader.form.names:
        if not isinstance(order, Mapping) or order.get(name) != getattr(loader, name):
            raise ArgumentError(f"LocalSteps.restore: the data set or the order of its batches is another one ({name} differs)")
    version, seed, members = state["version"], state["seed"], state.get("members", {})
    if not _is_number(version):
        raise ArgumentError(f"LocalSteps.restore: version {version!r:.100}; expected a number from 0 on")
    if not isinstance(seed, (list, tuple)) or not all(map(_is_number, seed)):
        raise ArgumentError(f"LocalSteps.restore: seed {seed!r:.100}; expected a list of numbers from 0 to 2**63 - 1")
    with _making_sense("the state"):
        ledger = BatchLedger(loader.batches, state["data"])
        made = BaseState(parameters, buffers, base.trained, coordinator.make_outer, version)
        made.outer.load_state_dict(_by_number(state["outer"]))
    _take_contributed(ledger, members)
    for owner in (each.owner for each in coordinator.remotes if each.owner in members):
        with _making_sense(f"the state of the member on {owner}"):
            _check_member(coordinator, members[owner], version)
    return made, made.digest(), ledger, tuple(seed), list(answer.values())


@contextlib.contextmanager
def _making_sense(what: str) -> Iterator[None]:
    """A block that reads a part of a checkpoint; an error is an ArgumentError that names the part."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, ProtocolError) as error:
        raise ArgumentError(
            f"LocalSteps.restore: {what} makes no sense: {type(error).__name__}: {error}. Nothing has changed: restore a checkpoint as checkpoint() "
            "has returned it"
        ) from error


def _is_number(value: Any) -> bool:
    """True for an int that can be sent, and is at least 0."""
    return value.__class__ is int and 0 <= value < 1 << 63


def _by_number(state: Any) -> dict[str, Any]:
    """The state of an optimizer with the numbers of parameters as ints."""
    return {"state": {int(number): each for number, each in state["state"].items()}, "param_groups": state["param_groups"]}


# ---------------------------------------------------------------- members


def _check_member(coordinator: RoundCoordinator, saved: Mapping[str, Any], version: int) -> None:
    """Raise unless a member can go on with its state.

    Args:
        coordinator: of the training.
        saved: the state of the member.
        version: of the base in the checkpoint.

    Raises:
        ArgumentError, AttributeError, KeyError, ProtocolError, TypeError, ValueError: it cannot.
    """
    base, form, inner = coordinator.base, coordinator.form, _by_number(saved["inner"])
    optimizer = coordinator.make_inner([*base.parameters.values()])
    if hasattr(optimizer, "load_state_dict"):
        optimizer.load_state_dict(inner)
    contribution = saved["contribution"]
    residuals = [saved["residuals"]] if contribution is None else [saved["residuals"], contribution["rest"]]
    for payload in residuals:
        if payload is not None:
            form.unpack(payload)
    if contribution is None:
        return
    result = parse(LocalResult, encode(LocalResult(**contribution["result"])))
    form.unpack(result.payload, form.compress)
    if (result.indices is None) == bool(coordinator.outline.loader.sampler) or result.began > version:
        raise ArgumentError(f"its contribution is of version {result.began}, with indices {result.indices!r:.100}; the checkpoint is of {version}")
    if not _is_number(contribution["number"]) or not (contribution["carried"] is None or _is_number(contribution["carried"])):
        raise ArgumentError(f"its contribution has number {contribution['number']!r:.100} and carried {contribution['carried']!r:.100}")
    _arrays("buffers of a contribution", contribution["buffers"], base.buffers)
    if contribution["local"] is not None:
        values = base.values()
        _arrays("the module of a contribution", contribution["local"], {path: values[mine] for path, mine in coordinator.outline.state.items()})


def _take_contributed(ledger: BatchLedger, members: Any) -> None:
    """Hand out the batches of all contributions. Raises an ArgumentError for one that does not wait, and for states of members that are none."""
    try:
        places = [(name, place) for name, each in members.items() for place in _contributed(each)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"LocalSteps.restore: the states of the members make no sense: {type(error).__name__}: {error}") from error
    for name, place in places:
        try:
            ledger.take_at(place)
        except (ArgumentError, ModeError) as error:
            found = "it is in a contribution already" if place in ledger.open else error
            raise ArgumentError(
                f"LocalSteps.restore: the contribution of {name} has batch {place.number} of epoch {place.epoch}, but {found}. Expected batches that "
                f"no round has read, each once; read is everything before batch {ledger.first.number} of epoch {ledger.first.epoch}. Nothing has "
                "changed: restore a checkpoint as checkpoint() has returned it, or this one without its part members"
            ) from error


def _contributed(saved: Mapping[str, Any]) -> list[BatchPlace]:
    """The batches of the contribution in the state of a member. Raises a KeyError or TypeError if a part of the state is missing."""
    contribution, _, _ = (saved[part] for part in ("contribution", "inner", "residuals"))
    if contribution is None:
        return []
    batches, result, *_ = (contribution[part] for part in ("batches", "result", "number", "carried", "buffers", "rest", "local"))
    LocalResult(**result)
    return [BatchPlace(*map(int, each)) for each in batches]


async def members_of(coordinator: RoundCoordinator) -> dict[str, Any]:
    """The states of the members that compute nothing, by name; it is waited for computations that end without a round.

    Args:
        coordinator: of the training.

    Returns:
        Dicts that a checkpoint has as ``members``.
    """
    worker, seconds, found = coordinator.worker, coordinator.seconds_for(4 * coordinator.form.size), {}
    for member in await coordinator.rest():
        head, values = await fetch(worker, member.optimizer, ReadOptimizer, seconds)
        progress = parse(MemberProgress, await coordinator.ask(member, "progress"), member.owner)
        found[member.owner] = {
            "inner": {"state": _by_text(values), "param_groups": head["groups"]},
            "residuals": progress.residuals,
            "contribution": None,
        }
        if member.contribution is not None:
            number, batches, result, carried = member.contribution
            _, local = await fetch(worker, member.module, ReadModule, seconds) if coordinator.options.overlap else (None, None)
            found[member.owner]["contribution"] = {
                "number": number,
                "batches": [list(each) for each in batches],
                "result": {name: getattr(result, name) for name in result.form.names},
                "carried": carried,
                "buffers": {each.name: each.values for each in progress.buffers},
                "rest": progress.rest,
                "local": local,
            }
    return found


async def restore_members(coordinator: RoundCoordinator, saved: Mapping[str, Any]) -> None:
    """Let members with the names of earlier ones go on with their states. The others begin at the base.

    Args:
        coordinator: of the training, which has the state that `restored` returns.
        saved: the states by name.
    """
    mine = {member: saved[member.owner] for member in coordinator.remotes if member.owner in saved}
    contributions = {member: each["contribution"] for member, each in mine.items() if each["contribution"] is not None}
    waiting = {member: _contributed(each) for member, each in mine.items()}
    for each in (each for name, each in saved.items() if name not in {member.owner for member in mine}):
        for place in _contributed(each):
            coordinator.ledger.give_back(place)
    seconds = coordinator.seconds_for(4 * coordinator.form.size)
    try:
        for member, each in mine.items():
            await coordinator.update(member)
            await store_optimizer(coordinator.worker, member.optimizer, each["inner"], seconds)
            given = contributions.get(member)
            progress, contribution = MemberProgress(None, None, [], each["residuals"], None), None
            if given is not None:
                buffers = [ChangedBuffer(path, values) for path, values in given["buffers"].items()]
                progress = MemberProgress(given["number"], given["result"]["payload"], buffers, each["residuals"], given["rest"])
                contribution = RemoteContribution(given["number"], waiting[member], LocalResult(**given["result"]), given["carried"])
                if given["local"] is not None:
                    await store(coordinator.worker, member.module, LoadModule, given["local"], seconds)
            await coordinator.ask(member, "resume", encode(progress))
            coordinator.go_on(member, contribution, can_carry=given is not None and given["local"] is not None)
            waiting.pop(member, None)
    finally:  # batches of members that could not go on
        for place in (place for batches in waiting.values() for place in batches):
            coordinator.ledger.give_back(place)


def _by_text(value: Any) -> Any:
    """The same with texts as names of dicts."""
    return {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else value


def _arrays(what: str, given: Any, expected: Mapping[str, Array]) -> dict[str, Array]:
    """Copies of arrays by path, in the order of the expected ones, which they are like."""
    if not isinstance(given, Mapping) or given.keys() != expected.keys():
        found = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(f"LocalSteps.restore: {what} {found or 'none'}; expected {', '.join(expected) or 'none'}")
    arrays = {}
    for path, like in expected.items():
        values = np.asarray(given[path]._data if isinstance(given[path], TensorCore) else given[path])
        if (values.shape, values.dtype) != (like.shape, like.dtype):
            found = f"{values.dtype}{list(values.shape)}"
            raise ArgumentError(f"LocalSteps.restore: {path} is {found}; expected {like.dtype}{list(like.shape)}")
        arrays[path] = values.copy()
    return arrays
