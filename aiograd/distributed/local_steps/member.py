"""LocalStepsMember: one member of a training with local steps, on its worker, as the coordinating process asks it.

Note [Order of a member's life]
    A member is made around a module and its two optimizers, and `adopt` gives it the base. Then it is asked to `compute` local steps, which wait as
    its contribution. A round is a step of `aiograd.coordination`: `prepare` computes the next base of the answer, `commit` goes on to it, `abort`
    drops it. A member that was not asked to prepare a round is given its answer later (`replay`), before anything else.
    Members know the coordinating process only: it alone tells them the outcome of a round.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from aiograd.coordination.client import StepWording
from aiograd.coordination.member import StepMember
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.outline import ModuleOutline
from aiograd.coordination.session import StepSession, StepWork, kept_for
from aiograd.distributed.local_steps.local_training import LocalTraining
from aiograd.distributed.local_steps.round_messages import (
    ChangedBuffer,
    DealtBatch,
    MemberDigest,
    MemberOptions,
    MemberOutline,
    MemberProgress,
    PreparedRound,
    RoundAnswer,
)
from aiograd.errors import ArgumentError, DistributedError, ProtocolError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.running.offloading import offload
from aiograd.running.types import Array
from aiograd.tensors.core import make

SUBJECT = "LocalSteps"
WORDING = StepWording(
    subject=SUBJECT,
    failure=DistributedError,
    in_doubt="The coordinating process settles it, or takes the member in anew.",
    lost="The member is taken in anew.",
    without="Take the member in again with `await training.add({worker!r})` once its worker runs",
    unconfirmed="The members are taken in anew, once they can be reached",
)


class LocalStepsMember(StepMember[StepWork]):
    """A member on its worker. See Note [Order of a member's life].

    Args:
        modules: the module.
        options: the wire value of a `MemberOptions`.
        worker: the worker.

    Raises:
        ArgumentError: not one module. ProtocolError: malformed options.
    """

    wording = WORDING

    def __init__(self, modules: list[Any], options: dict[str, Any], worker: Any) -> None:
        super().__init__(worker)
        #: a round is over here
        self._settled = asyncio.Event()
        if len(modules) != 1:
            raise ArgumentError(f"a member of LocalSteps of {len(modules)} modules; expected one")
        found = parse(MemberOptions, options)
        optimizers = found.optimizer.local_value(), found.outer.local_value()
        self._training = LocalTraining(modules[0], *optimizers, found.method, found.data, found.clip_norm, found.compressors)

    def _make_work(self, step: int) -> StepWork:
        return StepWork(step)

    def _others(self, session: StepSession[StepWork]) -> Iterable[Any]:
        return ()

    def _ended(self, session: StepSession[StepWork]) -> None:
        super()._ended(session)
        self._settled.set()

    # ---------------------------------------------------------------- the state

    async def describe(self) -> dict[str, Any]:
        """The `MemberOutline`."""
        module = self._training.module
        paths = {id(each): path for path, each in [*module.named_parameters(), *module.named_buffers()]}
        named = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
        state = {path: paths[id(named[path])] for path in module.state_dict() if path in named}
        return encode(MemberOutline(ModuleOutline.of({"": module}), state, self._training.order.outline))  # type: ignore[no-any-return]

    async def buffers(self, only_changed: bool) -> list[Any]:
        """Buffers of the module by path.

        Args:
            only_changed: True: only buffers that local steps have changed.
        """
        found = self._training.changed_buffers() if only_changed else self._training.buffers
        return [encode(ChangedBuffer(path, make(values))) for path, values in found.items()]

    async def adopt(self, version: int, seed: list[int], buffers: list[Any], is_new: bool) -> str:
        """Take the state that the module and the outer optimizer have now as the base; see `LocalTraining.adopt`. Earlier rounds are over.

        Returns:
            The digest of the base.
        """
        training = self._training
        values = _values((parse(ChangedBuffer, each) for each in buffers), training.buffers)
        async with training.alone():
            self._forget_step()
            return await offload(lambda: training.adopt(version, seed, values, is_new=is_new))

    async def progress(self) -> dict[str, Any]:
        """The `MemberProgress`."""
        return encode(await offload(self._training.progress))  # type: ignore[no-any-return]

    async def resume(self, progress: dict[str, Any]) -> bool:
        """Go on with the state of an earlier member; its inner optimizer has been loaded.

        Args:
            progress: the wire value of a `MemberProgress`.
        """
        training = self._training
        found = parse(MemberProgress, progress)
        buffers = _values(found.buffers, training.base.buffers)
        async with training.alone():
            training.resume(found, buffers)
        return True

    async def digest(self) -> list[Any]:
        """The `MemberDigest` of the base."""
        base = self._training.base
        return encode(MemberDigest(base.version, await offload(base.digest)))  # type: ignore[no-any-return]

    async def replay(self, answers: list[Any]) -> int:
        """Go on to the bases of rounds that were committed without this member. Cancelled, it has gone on to some of them.

        Args:
            answers: the wire values of a `RoundAnswer` for each.

        Returns:
            The version of the base then.
        """
        training = self._training
        async with training.alone():
            self._forget_step()
            for each in answers:
                answer = parse(RoundAnswer, each)
                if answer.version == training.base.version + 1:
                    await _stage(training, answer)
                    training.base.commit()
        return training.base.version

    # ---------------------------------------------------------------- rounds

    async def compute(self, number: int, version: int, batches: list[Any], is_fresh: bool, carried: int | None, overlap: int) -> dict[str, Any]:
        """Take local steps; see `LocalTraining.compute`. Cancelling stops them.

        Args:
            number: of this computation.
            version: of the base; with `carried` of the one before the round in exchange.
            batches: the wire values of a `DealtBatch` for each.
            is_fresh, carried, overlap: as of `LocalTraining.compute`.

        Returns:
            The wire value of a `LocalResult`.

        Raises:
            DistributedError: the base here has another version. Exceptions of the loss.
        """
        training = self._training
        dealt = [parse(DealtBatch, each) for each in batches]
        while carried is None and training.base.version < version and self._session is not None and self._session.transaction.is_prepared:
            self._settled.clear()  # the outcome of the round is on its way
            await self._settled.wait()
        async with training.alone():
            if carried is None and training.base.version != version:
                raise DistributedError(f"the base on {self._worker.name} has version {training.base.version}, expected {version}")
            places = [(each.epoch, each.number) for each in dealt]
            result = await training.compute(number, places, is_fresh=is_fresh, carried=carried, overlap=overlap)
        return encode(result)  # type: ignore[no-any-return]

    async def prepare(self, step: int, answer: dict[str, Any], number: int | None, coordinator: Any) -> dict[str, Any]:
        """Compute the next base, up to the commit. Cancelling gives the round up.

        Args:
            step: the number of this attempt; see Note [Steps] in `aiograd.coordination.member`.
            answer: the wire value of a `RoundAnswer`.
            number: of the computation that contributes to it; None: this member does not contribute.
            coordinator: reference to the outcomes of rounds in the coordinating process.

        Returns:
            The wire value of a `PreparedRound`.

        Raises:
            DistributedError: the round comes too late, has another base, or another contribution waits here.
        """
        training = self._training
        found = parse(RoundAnswer, answer)
        session = self._begin_to_run(step, coordinator)
        try:
            if found.version != training.base.version + 1:
                raise DistributedError(f"a round leads to base {found.version}, and {self._worker.name} has base {training.base.version}")
            contribution = None if number is None else training.contribution(number)
            digest = await _stage(training, found, None if contribution is None else contribution.payload)
        except BaseException:
            session.failed()
            raise
        session.prepared(StagedRound(functools.partial(training.go_on, contribution)))
        return encode(PreparedRound(kept_for(self._worker.lease), digest))  # type: ignore[no-any-return]


class StagedRound:
    """A round of one process, up to the commit.

    Args:
        commit: goes on to the next base.
        tell: called after it.
    """

    #: gradients stay out of leaves
    leaves: frozenset[AccumulateGrad] = frozenset()

    def __init__(self, commit: Callable[[], None], tell: Callable[[], None] = lambda: None) -> None:
        self.commit = commit
        self._tell = tell

    async def after_commit(self) -> None:
        """Tell of the round."""
        self._tell()


async def _stage(training: LocalTraining, answer: RoundAnswer, own: Any = None) -> str:
    """Compute the base of an answer beside the one that is there; `own` is the payload of this member. Returns the digest of the base."""
    payloads = [own if each is None else each for each in answer.payloads]
    buffers = _values(answer.buffers, training.base.buffers)
    withdrawn: list[bool] = []

    def compute() -> str:
        return training.base.stage(training.form.means(answer.kind, payloads, answer.rows), buffers, withdrawn)

    try:
        return await offload(compute)
    except BaseException:
        withdrawn.append(True)
        raise


def _values(buffers: Iterable[ChangedBuffer], expected: Mapping[str, Array]) -> dict[str, Array]:
    """The values of buffers by path, which are like the expected ones."""
    found = {}
    for each in buffers:
        values, like = getattr(each.values, "_data", None), expected.get(each.name)
        if not isinstance(values, np.ndarray) or like is None or (values.shape, values.dtype) != (like.shape, like.dtype):
            text = f"the buffer {each.name!r:.200} of a round does not fit the module, which has {', '.join(expected) or 'no buffers'}"
            raise ProtocolError(text, code="local-steps")
        found[each.name] = values
    return found
