"""LocalSteps: members on several workers that take steps on their own, and exchange little; one process directs them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from aiograd.coordination.compressed_pass import checked_compressor
from aiograd.coordination.compression import Compressor, TopK
from aiograd.coordination.message_form import parse
from aiograd.distributed.data_parallel.controller_arguments import (
    checked_count,
    checked_method,
    checked_options,
    checked_workers,
    name_of_optimizer,
)
from aiograd.distributed.local_steps.base_coordinator import TrainingOptions, copies
from aiograd.distributed.local_steps.checkpoints import checkpoint_of, members_of, restore_members, restored
from aiograd.distributed.local_steps.coordinator import RoundCoordinator
from aiograd.distributed.local_steps.remote_local_member import RemoteLocalMember
from aiograd.distributed.local_steps.round_messages import MemberDigest
from aiograd.distributed.local_steps.round_record import RoundRecord
from aiograd.distributed.local_steps.round_statistics import LocalStepsStatistics
from aiograd.distributed.rpc.keyring import check_name
from aiograd.distributed.worker import Worker
from aiograd.engine.run import check_can_run
from aiograd.engine.run.failures import clear_frames
from aiograd.errors import ArgumentError, EngineClosedError, ModeError
from aiograd.running import tracing
from aiograd.running.modes import current_mode
from aiograd.running.offloading import offload
from aiograd.running.random import forked_seed
from aiograd.tensors.core import make
from aiograd.tensors.norms import checked_norm


class LocalSteps:
    """Members on several workers that train one model over slow links. Made by `create`.

    ::

        async with await dist.LocalSteps.create(driver, names, Net, data="data", steps=30, optimizer_options={"lr": 1e-3}) as training:
            async for record in training.rounds(epochs=3):
                print(record.number, record.losses)
            state = await training.state_dict()

    Each member takes local steps on batches of its own; the difference between the base at which it began and its parameters is its
    *pseudo-gradient*. In a round all members send theirs to this process. The mean over all rows is the gradient of the *outer optimizer*, which
    makes the next base, the same to the bit on all. A round changes base, outer optimizer, buffers and the place in the data on all of its members,
    or nothing anywhere. Each batch of an epoch is read once.

    Members need a connection to this process only, which they may have opened themselves.

    Args:
        coordinator: as `create` makes it.

    >>> record = await training.round()
    >>> record.number, record.members, training.version
    (1, ('left', 'right'), 1)
    """

    def __init__(self, coordinator: RoundCoordinator) -> None:
        self._coordinator = coordinator
        self._turn = asyncio.Lock()
        self._entering = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def create(
        cls,
        driver: Worker,
        names: Sequence[str],
        module: type[Any] | str,
        /,
        *args: Any,
        data: str = "data",
        steps: int = 30,
        optimizer: Any = "AdamW",
        optimizer_options: Mapping[str, Any] | None = None,
        outer: Any = "SGD",
        outer_options: Mapping[str, Any] | None = None,
        compress: Compressor | None = None,
        answer: Compressor | None = None,
        overlap: int = 0,
        quorum: int = 1,
        patience: float | None = None,
        method: str = "loss",
        clip_norm: float | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Make members on workers; all begin with the state of the first.

        Cancelled or failed, no member is left on workers that can be reached.

        Args:
            driver: this process's worker, which knows the others, or which they have connected to.
            names: of the workers; batches are dealt and pseudo-gradients are added up in their order.
            module: the class, or its name: a module that the workers' service exposes with ``@service.reference``.
            *args: of the class.
            data: name of a method of the module that returns an ``ag.data.DataLoader`` over the whole data set, alike on all members.
            steps: local steps of a member between two rounds.
            optimizer: the inner optimizer, of the local steps: a class of ``ag.optim``, or one that the workers' services expose, or its name.
            optimizer_options: of it, such as ``{"lr": 1e-3}``.
            outer: the outer optimizer, of the rounds, likewise.
            outer_options: of it; None: learning rate 0.7 and Nesterov momentum 0.9 of SGD, with `TopK` 0.9 and 0.5; and the defaults of others.
            compress: compressor of the pseudo-gradients of each parameter, such as ``dist.TopK(1 / 16, bits=4)``. The values that it leaves out are
                added to the next ones of that member. None: they are sent as they are.
            answer: compressor of the weighted sum that all members get, likewise. None: they get all payloads, or the mean if it is shorter.
            overlap: local steps of the next round during which a round is exchanged; it is applied after the last of them. 0: members wait.
            quorum: members without which no round is taken.
            patience: seconds after which a round goes on without the members that still compute, once the quorum is ready. They contribute to a later
                round, with the pseudo-gradient against the base at which they began. None: it waits for all.
            method: name of the method that computes the loss, ``module.loss(*batch)``: a 0-d Tensor, the mean over the rows of the batch.
            clip_norm: gradients of a local step are scaled so that their norm is at most this; None: they are not.
            timeout: seconds for each request to a worker, the local steps of a round included; None: the worker's default, and for local steps the
                longest deadline (`Limits.max_deadline`).

        Returns:
            The training; leave it with ``async with`` or `aclose`.

        Raises:
            ArgumentError, ArgumentTypeError: the arguments cannot be used; models or data sets are not alike. WorkerLostError, UnknownPeerError: a
            worker cannot be reached. RemoteError: a model, a loader or an optimizer could not be made.

        >>> training = await dist.LocalSteps.create(driver, ["left", "right"], "Learner", steps=2, optimizer=ag.optim.SGD)
        >>> training.names, training.version
        (('left', 'right'), 0)
        """
        given = checked_workers("LocalSteps", driver, names)
        options = TrainingOptions(
            steps=checked_count("LocalSteps", "steps", steps),
            optimizer=name_of_optimizer("LocalSteps", "optimizer", optimizer),
            optimizer_options=checked_options("LocalSteps", "optimizer_options", optimizer_options),
            outer=name_of_optimizer("LocalSteps", "outer", outer),
            outer_class=None if isinstance(outer, str) else outer,
            outer_options=_outer_options(outer, outer_options, compress),
            compress=checked_compressor("LocalSteps", "compress", compress),
            answer=checked_compressor("LocalSteps", "answer", answer),
            overlap=checked_count("LocalSteps", "overlap", overlap, steps, 0),
            quorum=checked_count("LocalSteps", "quorum", quorum, len(given)),
            patience=_checked_patience(patience),
            method=checked_method("LocalSteps", "method", method),
            data=checked_method("LocalSteps", "data", data),
            clip_norm=checked_norm("LocalSteps", clip_norm),
            seed=forked_seed(),
        )
        coordinator = RoundCoordinator(driver, module, args, options, timeout)
        try:
            await coordinator.begin(given)
        except BaseException:
            await coordinator.aclose()
            raise
        return cls(coordinator)

    def __repr__(self) -> str:
        return f"<LocalSteps: version {self.version}, members on {', '.join(self.names)}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let the workers forget the members. Waits for a round that is under way. Idempotent; cancelled, some workers may keep their member.

        >>> await training.aclose()
        """
        async with self._turn, self._entering:
            self._is_closed = True
            await self._coordinator.aclose()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers with members, in the order in which pseudo-gradients are added up."""
        return tuple(each.owner for each in self._coordinator.remotes)

    @property
    def version(self) -> int:
        """The number of committed rounds."""
        return self._coordinator.base.version

    @property
    def epoch(self) -> int:
        """The number of epochs that are read to their end."""
        return self._coordinator.ledger.first.epoch

    @property
    def digest(self) -> str:
        """SHA-256 over parameters and buffers of the base by name, 64 hexadecimal digits; the same on all members that are up to date."""
        return self._coordinator.digest

    # ---------------------------------------------------------------- training

    async def round(self) -> RoundRecord:
        """Take a round: local steps on all members, the exchange, and the step of the outer optimizer.

        All members that contribute have taken it, or it raises and none has. Computed local steps are kept when it raises: the next call goes on
        with them. Rounds run one after the other. Cancelling withdraws the round: batches go back, and all members begin again at the
        base with fresh inner optimizers; unless it is decided already: then it is carried out, and the error that is raised has ``committed``
        True.

        With ``overlap`` a call exchanges the results of the call before, while members compute on; the first commits nothing, and its record has
        no members.

        Returns:
            The record of the round.

        Raises:
            QuorumError: too few members are left; nothing has changed. ArgumentError: the samplers of two members draw different batches of an
            epoch; these are not in the round, and go back. RemoteError: the loss or the data failed on a member, which begins again at
            the base with a fresh inner optimizer; its batches go back. ModeError: grad mode is off.

        >>> record = await training.round()
        >>> record.batches["left"]
        ((0, 0), (0, 1))
        """
        while True:  # without an end of epochs there are always batches
            record = await self._round("round", None)
            if record is not None:
                return record

    async def rounds(self, epochs: int = 1) -> AsyncIterator[RoundRecord]:
        """Take rounds until some epochs are read; the last rounds may have fewer batches. With ``overlap`` the last exchange is committed, too.

        Cancelling or leaving the loop stops between two rounds, or as `round` says.

        Args:
            epochs: how many to read, the one that has begun included.

        Yields:
            The record of each round.

        Raises:
            As `round`.

        >>> [record.number async for record in training.rounds(epochs=1)]
        [1, 2]
        """
        before = self.epoch + checked_count("LocalSteps", "epochs", epochs)
        while (record := await self._round("rounds", before)) is not None:
            yield record

    async def _round(self, what: str, before: int | None) -> RoundRecord | None:
        check_can_run(f"LocalSteps.{what}()")
        if not current_mode().grad:
            raise ModeError(f"LocalSteps.{what}() computes gradients, but grad mode is off")
        try:
            async with self._turn:
                coordinator = self._open()
                with tracing.span("round of local steps", attributes={"aiograd.members": len(self.names)}):
                    return await coordinator.round(before)
        except BaseException as error:
            clear_frames(error, "aiograd.distributed.local_steps.")
            raise

    # ---------------------------------------------------------------- states

    async def digests(self) -> dict[str, str]:
        """The digest of the base on each member that is up to date and can be reached, computed there.

        Cancelling changes nothing.

        Returns:
            Digests by name, each equal to `digest`.

        >>> (await training.digests())["right"] == training.digest
        True
        """
        async with self._turn:
            coordinator = await self._told()
            members = [each for each in coordinator.remotes if each.version == coordinator.base.version]
            found: dict[str, str] = {}

            async def ask(member: RemoteLocalMember) -> None:
                digest = parse(MemberDigest, await coordinator.ask(member, "digest"), member.owner)
                if digest.version == coordinator.base.version:
                    found[member.owner] = digest.digest

            await coordinator.each(members, ask)
            return {each.owner: found[each.owner] for each in members if each.owner in found}

    async def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters and buffers of the base, which this process has. Cancelling changes nothing.

        Returns:
            Tensors by name, as the module's ``state_dict()`` has them.

        >>> list(await training.state_dict())
        ['weight']
        """
        async with self._turn:
            coordinator = self._open()
            paths, values = coordinator.outline.state, coordinator.base.values()
            found, _ = await offload(copies, {path: values[mine] for path, mine in paths.items()}, None)
            return {path: make(each) for path, each in found.items()}

    async def checkpoint(self, members: bool = False) -> dict[str, Any]:
        """A copy of the state that all members share: base, buffers, outer optimizer, and the place in the data. Cancelling changes nothing.

        It fits any number of members. Batches that are dealt and not in a round yet count as not read.

        Args:
            members: True: also inner optimizers, residuals, and local steps that wait for a round, of each member: with the same names the training
                goes on to the same bits. It waits for late members.

        Returns:
            A dict for `restore`, which `ag.save` takes.

        >>> state = await training.checkpoint()
        >>> state["version"], list(state["parameters"])
        (0, ['weight'])
        """
        async with self._turn:
            coordinator = await self._told()
            states = {"members": await members_of(coordinator)} if members else {}
            return await checkpoint_of(coordinator) | states

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: all members begin at its base and read the batches that it has not read.

        Their inner optimizers are fresh, unless the checkpoint has the state of a member of the same name. Batches that are dealt go back before.
        Cancelled or failed, either nothing has changed, or all members have the base before they compute again.

        Args:
            state: the result of `checkpoint`.

        Raises:
            ArgumentError: it is no such state, or one of another model, data set or order of batches; nothing has changed.

        >>> state = await training.checkpoint()
        >>> record = await training.round()
        >>> await training.restore(state)
        >>> training.version
        0
        """
        async with self._turn, self._entering:
            coordinator = await self._told()
            await coordinator.replace_base(*restored(coordinator, state))
            await restore_members(coordinator, state.get("members", {}))
            await coordinator.update_all()

    def statistics(self) -> LocalStepsStatistics:
        """Figures of this training so far. Each round logs them with ``ag.log``, as ``local_steps/...``, beside its mean loss.

        Returns:
            Counts, bytes and seconds.

        >>> training.statistics().rounds
        0
        """
        return self._coordinator.statistics()

    # ---------------------------------------------------------------- membership

    async def add(self, name: str) -> None:
        """Take in another member, beside running rounds: it gets the base from this process, and takes part from the next round on.

        Its rank is the last; its inner optimizer is fresh. It replaces a lost member on this worker; nothing happens where the member there is
        not lost. Cancelled or failed, the members are the same as before.

        Args:
            name: of the worker, which this process knows, or which has connected to it.

        Raises:
            ArgumentError: the model or the data set there is not like the others. WorkerLostError: the worker cannot be reached.

        >>> await training.remove("left")
        >>> await training.add("left")
        >>> training.names
        ('right', 'left')
        """
        check_name("LocalSteps.add", name)
        async with self._entering:
            await self._open().enter(name)

    async def remove(self, name: str) -> None:
        """Go on without a member, which may be lost; its batches go back. Waits for a round that is under way.

        Cancelled, the member is removed or not, and its worker may not know.

        Args:
            name: of the worker.

        Raises:
            ArgumentError: there is no such member, or no other.

        >>> await training.remove("right")
        >>> training.names
        ('left',)
        """
        async with self._turn:
            coordinator = self._open()
            coordinator.leave(coordinator.find_removable("LocalSteps", "member", name))

    async def _told(self) -> RoundCoordinator:
        """The coordinator, when the members have confirmed the last round."""
        coordinator = self._open()
        await coordinator.told()
        return coordinator

    def _open(self) -> RoundCoordinator:
        if self._is_closed:
            raise EngineClosedError("this LocalSteps has been closed; make a new one")
        return self._coordinator


def _outer_options(outer: Any, options: Mapping[str, Any] | None, compress: Any) -> dict[str, Any]:
    if options is not None:
        return checked_options("LocalSteps", "outer_options", options)
    if name_of_optimizer("LocalSteps", "outer", outer) != "SGD":
        return {}
    return {"lr": 0.9, "momentum": 0.5, "nesterov": True} if isinstance(compress, TopK) else {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def _checked_patience(patience: Any) -> float | None:
    if patience is None:
        return None
    if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 <= patience < math.inf:
        raise ArgumentError(f"LocalSteps(patience={patience!r}): expected seconds from 0 on, or None")
    return float(patience)
