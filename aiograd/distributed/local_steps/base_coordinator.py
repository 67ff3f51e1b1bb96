"""BaseCoordinator: the members of a training with local steps and the base that they share: how they are made, catch up and are lost.

Note [A star]
    Members send to the coordinating process only, and it answers all with the same bytes. It holds the base itself, and commits each round first,
    which decides it. So a member that is lost takes nothing with it, and a new one gets everything from here: the base, and then the answers of the
    rounds that were committed meanwhile. Answers are kept up to the size of a state; a member that lacks more gets the base again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiograd.coordination.compression import Compressor
from aiograd.coordination.compressor_message import sent_form
from aiograd.coordination.coordinator import restarted
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.outline import difference
from aiograd.data.ledger import BatchLedger
from aiograd.distributed.data_parallel.module_coordinator import ModuleCoordinator
from aiograd.distributed.local_steps.base_state import BaseState
from aiograd.distributed.local_steps.batch_order import BatchOrder, loader_difference
from aiograd.distributed.local_steps.member import WORDING
from aiograd.distributed.local_steps.payload_form import PayloadForm
from aiograd.distributed.local_steps.remote_local_member import RemoteLocalMember
from aiograd.distributed.local_steps.round_messages import ChangedBuffer, MemberOptions, MemberOutline
from aiograd.distributed.local_steps.round_statistics import LocalStepsStatistics, RoundFigures
from aiograd.distributed.messages.library import CreateOptimizer, LoadModule, ReadModule, ask_library
from aiograd.distributed.objects.object_server import plain
from aiograd.distributed.objects.optimizer_server import OPTIMIZERS
from aiograd.distributed.objects.parameter_stream import fetch, store, store_optimizer
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.engine.run.together import together
from aiograd.errors import ArgumentError, DeadlineError, DistributedError, NotExposedError, ReferenceLostError, UnknownPeerError, WorkerLostError
from aiograd.running.assembly import LOCAL_STEPS_ADAPTER
from aiograd.running.log_fields import structured_logger
from aiograd.running.offloading import offload
from aiograd.running.types import Array
from aiograd.tensors.core import make

logger = structured_logger("aiograd.local_steps")

#: bytes per second of the slowest line
SLOWEST = 10_000
#: bytes of the answers in one message at most, unless one alone has more
REPLAYED = 16 << 20
#: requests with answers to a member that joins, before it takes part: rounds are committed meanwhile
CATCHING_UP = 5


@dataclass(frozen=True)
class TrainingOptions:
    """The arguments of `LocalSteps.create`, checked."""

    steps: int
    optimizer: str
    optimizer_options: Mapping[str, Any]
    outer: str
    outer_class: Callable[..., Any] | None
    outer_options: Mapping[str, Any]
    quorum: int
    patience: float | None
    method: str
    data: str
    clip_norm: float | None
    compress: Compressor | None
    answer: Compressor | None
    overlap: int
    seed: tuple[int, ...]


def copies(values: Mapping[str, Array], state: Any) -> tuple[dict[str, Array], Any]:
    """Copies of arrays by path, and of the state of an optimizer. May run on any thread."""
    return {path: each.copy() for path, each in values.items()}, plain(state)


@contextlib.contextmanager
def _reaching(remote: RemoteLocalMember) -> Iterator[None]:
    """Requests to a member within the block raise a WorkerLostError if they get no answer, for any reason."""
    try:
        yield
    except ReferenceLostError as error:
        raise restarted(remote, error) from error
    except (DeadlineError, UnknownPeerError) as error:
        raise WorkerLostError(f"{remote.name} does not answer: {error}", worker=remote.owner, stage="local steps") from error


class BaseCoordinator(ModuleCoordinator[RemoteLocalMember]):
    """The members and their base. See Note [A star].

    Args:
        worker: this process's worker.
        module_class, args: of the modules.
        options: of the training.
        timeout: seconds for each request; None: the worker's default.
    """

    base: BaseState
    form: PayloadForm
    outline: MemberOutline
    order: BatchOrder
    ledger: BatchLedger

    def __init__(self, worker: Worker, module_class: Any, args: Sequence[Any], options: TrainingOptions, timeout: float | None) -> None:
        super().__init__(WORDING, worker, module_class, args, timeout)
        self.options = options
        #: of the random numbers of all batches
        self.seed: tuple[int, ...] = options.seed
        self.figures: RoundFigures = RoundFigures()
        #: of the base
        self.digest: str = ""
        #: names of the workers of members that were lost since the last round
        self.lost: list[str] = []
        #: by parameter the values that the compressor of answers has left out
        self.residuals: list[Array | None] = []
        #: by epoch the digest of the batches of a sampler, and the first member that has read of them
        self._orders: dict[int, tuple[str, str]] = {}
        #: answers by the version of the base that they lead to, with their bytes
        self._answers: deque[tuple[int, Any, int]] = deque()
        #: requests to forget members
        self._farewells: set[asyncio.Task[None]] = set()
        self.decisions.has_tree = False  # members do not know each other

    @property
    def _replaces(self) -> bool:
        return True

    def seconds_for(self, size: int) -> float:
        """The timeout of a request or a transfer of so many bytes to each member, over one slow line."""
        if self._timeout is not None:
            return self._timeout
        limits = self.worker.limits
        return float(min(limits.default_deadline + size * max(1, len(self.remotes)) / SLOWEST, limits.max_deadline))

    async def ask(self, remote: RemoteLocalMember, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of a member.

        Raises:
            WorkerLostError: its worker is lost or was restarted, or does not answer in time.
        """
        with _reaching(remote):
            return await remote.ref.call(method, *args, timeout=self._timeout if timeout is None else timeout)

    # ---------------------------------------------------------------- making members

    async def begin(self, names: Sequence[str]) -> None:
        """Make all members, and the base of the first one's state.

        Raises:
            As `LocalSteps.create`.
        """
        self.remotes[:] = await self.make(names)
        first = self.remotes[0]
        outlines = await together([self._describe(each) for each in self.remotes])
        self.outline = outlines[0]
        for member, outline in zip(self.remotes[1:], outlines[1:], strict=True):
            self._check_outline(member, outline, first.owner)
        _, state = await fetch(self.worker, first.module, ReadModule, self._timeout or self.worker.limits.max_deadline)
        buffers = [parse(ChangedBuffer, each, first.owner) for each in await self.ask(first, "buffers", False)]
        tensors = {self.outline.state[path]: values._data for path, values in state.items()}
        parameters = [each for each in self.outline.model.tensors if each.kind != "buffer"]
        trained = [each.name for each in parameters if each.kind == "parameter"]
        found = {each.name: each.values._data for each in buffers}
        self.base = BaseState({each.name: tensors[each.name] for each in parameters}, found, trained, self.make_outer, 0)
        self.form = PayloadForm(self.base.specs, self.options.compress, self.options.answer)
        self.order = BatchOrder(self.outline.loader)
        self.ledger = BatchLedger(self.outline.loader.batches)
        self.digest = await offload(self.base.digest)
        await together([self._give_base(each, is_new=True, is_made=True) for each in self.remotes])

    def make_outer(self, tensors: list[Any]) -> Any:
        """The outer optimizer of all parameters."""
        options = self.options
        make_optimizer = options.outer_class or OPTIMIZERS.get(options.outer) or self.worker._core.service.find_class(options.outer).cls
        return make_optimizer(tensors, **options.outer_options)

    def make_inner(self, tensors: list[Any]) -> Any:
        """An inner optimizer of all parameters; None if only the workers of members know the class."""
        options = self.options
        try:
            make_optimizer = OPTIMIZERS.get(options.optimizer) or self.worker._core.service.find_class(options.optimizer).cls
        except NotExposedError:
            return None
        return make_optimizer(tensors, **options.optimizer_options)

    async def _make(self, name: str) -> RemoteLocalMember:
        refs: list[RemoteRef] = []
        worker, timeout, options = self.worker, self._timeout, self.options
        try:
            refs.append(await worker.remote(name, self._module_class, *self._args, timeout=timeout))
            for optimizer, given in ((options.optimizer, options.optimizer_options), (options.outer, options.outer_options)):
                refs.append(await ask_library(worker, name, CreateOptimizer(optimizer, refs[:1], dict(given)), timeout))
            compress, answer = map(sent_form, (options.compress, options.answer))
            sent = MemberOptions(options.method, options.data, options.clip_norm, compress, answer, *refs[1:])
            refs.append(await refs[0].adapt(LOCAL_STEPS_ADAPTER, [], encode(sent), timeout=timeout))
        except BaseException:
            await self._forget(refs)
            raise
        return RemoteLocalMember(name, *refs)

    async def _describe(self, member: RemoteLocalMember) -> MemberOutline:
        return parse(MemberOutline, await self.ask(member, "describe"), member.owner)

    def _check_outline(self, member: RemoteLocalMember, outline: MemberOutline, first: str) -> None:
        """Raise unless model and data set are the same as on the first member."""
        where = difference(self.outline.model.tensors, outline.model.tensors)
        if where is not None or outline.state != self.outline.state:
            raise ArgumentError(
                f"LocalSteps: the models differ: of the parameters and buffers on {member.owner}, {where or 'the state'} as on {first}. Every worker "
                "has to make the same model from the same arguments"
            )
        where = loader_difference(self.outline.loader, outline.loader)
        if where is not None:
            raise ArgumentError(f"LocalSteps: the data sets of {member.owner} and {first} differ: {member.owner} has {where}")

    async def enter(self, name: str) -> None:
        """Take in a new member, in place of a lost one of the same worker if there is one."""
        before = self.find(name)
        if before is not None:
            try:
                await self.ask(before, "digest")
                return
            except WorkerLostError as error:
                self.lose(before, error)
        (made,) = await self.make([name])
        try:
            outline = await self._describe(made)
            self._check_outline(made, outline, self.remotes[0].owner if self.remotes else "this process")
            await self._give_base(made, is_new=True, is_made=True)
            for _ in range(CATCHING_UP):  # before the others have to wait for it
                if made.version != self.base.version:
                    await self._bring_nearer(made)
            if self.find(name) is not None:
                raise ArgumentError(f"LocalSteps.add({name!r}): it was added twice at the same time")
        except BaseException:
            await self.drop([made])
            raise
        self.remotes.append(made)

    # ---------------------------------------------------------------- the base of members

    async def _give_base(self, member: RemoteLocalMember, *, is_new: bool, is_made: bool = False) -> None:
        """Send a member the base.

        Args:
            is_new: nothing of the member's own state is kept.
            is_made: it has just been made, so it probably has the base before the first round.
        """
        version = -1
        while version != self.base.version:  # copied on a thread, while rounds are committed
            version, digest = self.base.version, self.digest
            values, optimizer = await offload(copies, self.base.values(), self.base.outer.state_dict())
        buffers = [encode(ChangedBuffer(path, make(values[path]))) for path in self.base.buffers]
        state = {path: values[mine] for path, mine in self.outline.state.items()}
        seconds = self.seconds_for(2 * self.form.size)
        if not is_made or version:
            await store(self.worker, member.module, LoadModule, state, seconds)
            await store_optimizer(self.worker, member.outer, optimizer, seconds)
        if await self.ask(member, "adopt", version, [*self.seed], buffers, is_new) != digest:
            if not is_made or version:
                raise DistributedError(f"LocalSteps: the base on {member.owner} differs from the one that was sent to it")
            await store(self.worker, member.module, LoadModule, state, seconds)
            await self.ask(member, "adopt", version, [*self.seed], buffers, is_new)
        member.version, member.is_new = version, False

    async def update(self, member: RemoteLocalMember) -> None:
        """Bring a member to the newest base; see Note [A star]."""
        while member.version != self.base.version:
            await self._bring_nearer(member)

    async def _bring_nearer(self, member: RemoteLocalMember) -> None:
        """Bring a member to the base that is the newest now, or nearer to it. Rounds may be committed meanwhile."""
        member.can_carry = False
        missing = [(answer, size) for version, answer, size in self._answers if version > member.version]
        if len(missing) < self.base.version - member.version:
            with _reaching(member):
                await self._give_base(member, is_new=member.is_new)
            return
        sent: list[Any] = []
        room = REPLAYED
        for answer, size in missing:
            if sent and room < size:
                break
            sent.append(answer)
            room -= size
        expected = member.version + len(sent)
        if await self.ask(member, "replay", sent, timeout=self.seconds_for(REPLAYED - room)) != expected:
            raise DistributedError(f"LocalSteps: {member.owner} has not gone on to base {expected}")
        member.version = expected

    def keep_answer(self, answer: Any, size: int) -> None:
        """Keep the answer of the newest round, for members that lack it."""
        self._answers.append((self.base.version, answer, size))
        while len(self._answers) > 1 and sum(each[2] for each in self._answers) > 2 * self.form.size:
            self._answers.popleft()

    async def replace_base(
        self, base: BaseState, digest: str, ledger: BatchLedger, seed: tuple[int, ...], residuals: list[Array | None]
    ) -> None:
        """Go on from another base, with nothing of the members' own states."""
        await self.withdraw_all()
        self.base, self.digest, self.ledger, self.seed, self.residuals = base, digest, ledger, seed, residuals
        self._answers.clear()
        for member in self.remotes:
            member.version, member.is_new = -1, True

    def statistics(self) -> LocalStepsStatistics:
        """See `LocalSteps.statistics`."""
        return self.figures.frozen([each.owner for each in self.remotes], self.worker.statistics().peers)

    # ---------------------------------------------------------------- members that go

    def lose(self, member: RemoteLocalMember, error: BaseException) -> None:
        """Go on without a member that is lost."""
        if member in self.remotes:
            logger.warning("local steps go on without the member on %s: %s", member.owner, error)
            self.lost.append(member.owner)
            self.figures.lost += 1
            self.leave(member)

    def leave(self, member: RemoteLocalMember) -> None:
        """Go on without a member. Its batches go back."""
        self.remotes.remove(member)
        self.decisions.forget(member)
        computing = self.withdraw(member)
        if computing is not asyncio.current_task():
            self._later(self._end(computing))
        self._later(self.drop([member]))

    def withdraw(self, member: RemoteLocalMember) -> asyncio.Task[None] | None:
        """Forget the computation and the contribution of a member. Its batches go back, and its next begins anew.

        Returns:
            The task that waits for it, cancelled by the caller.
        """
        computing, member.computing = member.computing, None
        contribution, member.contribution = member.contribution, None
        self.give_back(member)
        for batch in () if contribution is None else contribution.batches:
            self.ledger.give_back(batch)
        return computing

    def give_back(self, member: RemoteLocalMember) -> None:
        """The batches of a computation were not read, and the next begins anew."""
        batches, member.batches, member.is_fresh = member.batches, [], True
        for batch in batches:
            self.ledger.give_back(batch)

    async def withdraw_all(self) -> None:
        """Forget all computations."""
        await self._end(*map(self.withdraw, self.remotes))

    async def _end(self, *tasks: asyncio.Task[None] | None) -> None:
        await end([task for task in tasks if task is not None], current_engine().cancel_grace)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="aiograd:local steps:farewell")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def aclose(self) -> None:
        """End all computations, and let every worker forget its member."""
        await self._end(*[each.computing for each in self.remotes])
        await super().aclose()
        await self._end(*self._farewells)
