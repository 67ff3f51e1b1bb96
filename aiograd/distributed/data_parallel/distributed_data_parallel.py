"""DistributedDataParallel: the same training program on every worker of a group, each with its shard of the batch.

Note [When members exchange something]
    *First call.* All members get the parameters and buffers of rank 0, which they otherwise would not agree on. So the first call is a coroutine, and
    later ones return the module's result: ``await ddp(x)`` is right in both cases.

    *Backward.* Gradients are averaged while the pass runs, and committed on all members or on none; see `reducer`. With them travel the buffers of
    rank 0: a forward needs nothing from others then, and evaluation right after a step sees the same buffers everywhere. With a compressor the
    gradients travel as payloads, and the residuals of a member change in the same commit; see `aiograd.coordination.compressed_pass`.

    *A loader* (`data`) is at the place of rank 0 after `synchronize`, as the parameters are: both count the same batches. A member that is at another
    place and within a lease cannot move, since it computes with rows of that place; then it raises, and nothing changes.

    Nothing else is exchanged: an optimizer computes the same step from the same gradients, to the bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from aiograd.coordination.buckets import BUCKET_BYTES, ParameterSpec
from aiograd.coordination.compressed_pass import check_compressible, checked_compressor
from aiograd.coordination.compression import Compressor
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.data_parallel.reducer import GradientReducer
from aiograd.engine.evaluate import suspends
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError
from aiograd.tensors import inplace
from aiograd.tensors.core import make
from aiograd.tensors.creation import asarray


class DistributedDataParallel:
    """A module with gradients that are averaged over a group of workers.

    ::

        group = await dist.join_group(worker, names)                # on every member
        ddp = dist.DistributedDataParallel(Net(), group)
        optimizer = ag.optim.SGD(ddp.parameters(), lr=0.1)
        for x, y in shards[group.rank]:
            loss = F.cross_entropy(await ddp(x), y)
            await loss.backward()                                   # leaves the mean over all members in .grad
            optimizer.step()
            optimizer.zero_grad()

    Every member runs the same program: the same passes in the same order, one at a time. A gradient is ``((rank 0 + rank 1) + ...) / size`` with the
    same bits on every member and for any timing. A parameter that the pass of some members does not reach counts as zeros there; one that no pass
    reaches keeps its ``grad``. Either the pass returns on all members, or it raises on all, no ``grad`` has changed anywhere, and the group is over;
    ``DistributedDataParallel(module, await group.without(name))`` goes on with the others. Several models may share a group, if every member makes
    them in the same order and takes their passes in the same order, one after the other; other orders raise on all members.

    With ``compress`` gradients travel as payloads of a fraction of their size. Each member keeps by parameter the values that its payloads have
    left out (*residuals*), and adds them to the next gradient; a pass that fails leaves them as they were, too. The mean of the decoded gradients is
    computed in float64, in the order of the ranks, and rounded once. `compression_state_dict` has the residuals, for a new group or a checkpoint.

    It is called as the module itself, and `module` is the module. Make it after the module has been moved to its device. Parameters may be frozen
    and switched on again; a call raises a `GraphError` if a parameter requires grad that did not when this object was made.

    Args:
        module: with at least one parameter that requires grad; of equal structure on every member.
        group: the members.
        bucket_bytes: gradients travel in buckets of at least so many bytes, as soon as they are complete.
        broadcast_buffers: True to have the buffers of rank 0 on all members after every pass.
        timeout: seconds that members may be apart in a pass; None: `Limits.default_deadline`.
        compress: `TopK` or `Blockwise`, the same on every member; None: gradients are sent as they are.
        data: an `aiograd.data.DataLoader`, alike on every member, of which `synchronize` carries the place; ``data.leases(group.rank, group.size)``
            gives every member its rows of the same batches, each batch once. None: members read by themselves.

    Attributes:
        module, group, data: as given.

    Raises:
        ArgumentTypeError: `module` is no module, `group` no group, `compress` no compressor or `data` no loader, or a parameter is neither float32
            nor float64 with `compress`. ArgumentError: no parameter requires grad, such a `bucket_bytes`, or `data` draws its orders from the default
            generator, which differs between members.

    >>> members = [dist.DistributedDataParallel(ag.nn.Linear(2, 1), group) for group in groups]
    >>> y, z = await asyncio.gather(*(member(ag.ones(1, 2)) for member in members))
    >>> bool((y == z).all())
    True
    """

    def __init__(
        self,
        module: Any,
        group: Group,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        broadcast_buffers: bool = True,
        timeout: float | None = None,
        compress: Compressor | None = None,
        data: Any = None,
    ) -> None:
        if not all(hasattr(module, name) for name in ("named_parameters", "named_buffers", "state_dict")):
            raise ArgumentTypeError(f"DistributedDataParallel: expected a module, found {type(module).__name__}")
        if not isinstance(group, Group):
            raise ArgumentTypeError(f"DistributedDataParallel: expected what `await dist.join_group(...)` returns, found {type(group).__name__}")
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        specs = ((name, ParameterSpec(tuple(each.shape), np.dtype(each.dtype))) for name, each in trained.items())
        check_compressible("DistributedDataParallel", checked_compressor("DistributedDataParallel", "compress", compress), specs)
        if data is not None and not all(hasattr(data, name) for name in ("leases", "state_dict", "load_state_dict")):
            raise ArgumentTypeError(f"DistributedDataParallel(data=...): expected an ag.data.DataLoader, found {type(data).__name__}")
        if data is not None and data.shuffle and data.generator is None:
            raise ArgumentError(
                "DistributedDataParallel(data=...): the loader shuffles by the default generator, which differs between members; give it "
                "a generator, ag.data.DataLoader(..., shuffle=True, generator=ag.Generator(0))"
            )
        self.module = module
        self.group = group
        self.data = data
        self._trained = list(trained)
        self._timeout = timeout
        self._is_synchronized = False
        self._synchronizing: asyncio.Task[None] | None = None
        self._reducer = GradientReducer(
            group,
            trained.values(),
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            buffers=(lambda: list(module.buffers())) if broadcast_buffers else tuple,
            compress=compress,
            commit=functools.partial(group.commit, timeout=timeout),
        )
        self._reducer.attach()

    def __repr__(self) -> str:
        return f"DistributedDataParallel({self.module!r}, {self.group!r})"

    # ---------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_parameters()
        if self._is_synchronized:
            return self.module(*args, **kwargs)
        return self._first_call(args, kwargs)

    def _check_parameters(self) -> None:
        """Refuse parameters that passes would train on this member alone."""
        known = self._reducer.index_of
        for name, parameter in self.module.named_parameters() if self._reducer.is_attached else ():
            if parameter.requires_grad and parameter._node not in known:
                raise GraphError(
                    f"DistributedDataParallel: parameter {name} was added, replaced or switched on after this object was made, so its gradient "
                    "would not be averaged; on every member call detach() and make a new DistributedDataParallel(module, group)"
                )

    async def _first_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        await self.synchronize()
        value = self.module(*args, **kwargs)
        return await value if suspends(value) else value

    async def synchronize(self) -> None:
        """Give all members the parameters, buffers and place in the data of rank 0; the first call does it by itself.

        All members call it, also later: after loading a checkpoint on rank 0, for instance. With `data`, call it before the loop over leases.

        Raises:
            ArgumentError: the modules of two members differ in names, shapes or dtypes, or their loaders in kind, or a member within a lease is at
                another place than rank 0; nothing has changed. Otherwise as `Group.all_reduce`.

        Cancelling makes the group fail on every member.

        >>> members = [dist.DistributedDataParallel(ag.nn.Linear(2, 1), group) for group in groups]
        >>> _ = await asyncio.gather(*(member.synchronize() for member in members))
        >>> bool((members[0].module.weight == members[1].module.weight).all())
        True
        """
        if self._synchronizing is None or self._synchronizing.done():
            self._synchronizing = asyncio.get_running_loop().create_task(self._exchange_values(), name="aiograd:synchronize")
        await self._synchronizing  # several calls may wait; cancelling one of them ends it for all

    async def _exchange_values(self) -> None:
        try:
            await self._receive_values()
        except BaseException as error:
            self.group.abandon("the exchange of parameters", error)
            raise

    async def _receive_values(self) -> None:
        group, timeout = self._reducer.group, self._timeout
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        lines = [f"compress={self._reducer.compress}", *(f"{name}: {np.dtype(each.dtype)}{list(each.shape)}" for name, each in tensors.items())]
        outline = "\n".join([*lines, *_outline_of_data(self.data)])
        outlines = await group.all_gather(np.frombuffer(outline.encode(), np.uint8), timeout=timeout)
        for rank, found in enumerate(outlines):
            if found.tobytes() != outlines[0].tobytes():
                first, other = (each.tobytes().decode(errors="replace").split("\n") for each in (outlines[0], found))
                index = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
                mine, theirs = ((each[index] if index < len(each) else "nothing") for each in (first, other))
                part, wanted = ("module", "a module of the same structure") if index < len(lines) else ("data", "a loader of the same data")
                if not index:
                    part, wanted = "compressor", "the same compressor"
                raise ArgumentError(
                    f"DistributedDataParallel: the {part} differs between members: {theirs} on {group.names[rank]} (rank {rank}), "
                    f"{mine} on {group.names[0]} (rank 0); every member needs {wanted}"
                )
        move = _nothing if self.data is None else await self._moved_to(group, self.data)
        values = await group.broadcast([each.detach() for each in tensors.values()], timeout=timeout)

        def write() -> None:
            self._is_synchronized = True
            for target, value in zip(tensors.values(), values, strict=True) if group.rank else ():
                inplace.write(target, asarray(value).to(target.device)._data)
            move()

        await group.commit(write, timeout=timeout)

    async def _moved_to(self, group: Any, data: Any) -> Callable[[], None]:
        """Learn the place of rank 0 in the data; returns a function that moves this member there."""
        try:
            place = json.dumps(data.state_dict())
        except TypeError as error:
            raise ArgumentTypeError(
                f"DistributedDataParallel(data=...): the state of its source cannot be sent ({error}); expected numbers, texts, lists and dicts"
            ) from None
        places = await group.all_gather(np.frombuffer(place.encode() if group.rank == 0 else b"", np.uint8), timeout=self._timeout)
        there = json.loads(places[0].tobytes())
        if _without_draws(there) == _without_draws(json.loads(place)):
            return _nothing
        if data.is_within_lease:
            raise ArgumentError(
                f"DistributedDataParallel: {group.names[group.rank]} (rank {group.rank}) computes with a batch of another place than "
                f"{group.names[0]} (rank 0); `await ddp.synchronize()` on all members before the loop over leases"
            )
        return functools.partial(data.load_state_dict, there)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which passes accumulate on each member alone; the next pass outside of it averages all of that together with its own.

        ::

            with ddp.no_sync():
                await loss_of(first_half).backward()
            await loss_of(second_half).backward()               # one exchange for both

        Returns:
            A context manager.
        """
        before, self._reducer.is_enabled = self._reducer.is_enabled, False
        try:
            yield
        finally:
            self._reducer.is_enabled = before

    def compression_state_dict(self) -> dict[str, Any]:
        """The residuals of this member: copies of the values that its payloads have left out in committed passes.

        Returns:
            Tensors by the names of parameters; empty without `compress`, and before the first pass.

        >>> group, _ = groups
        >>> ddp = dist.DistributedDataParallel(ag.nn.Linear(2, 1), group, compress=dist.TopK(1 / 16, bits=4))
        >>> ddp.compression_state_dict()
        {}
        """
        return {name: make(each.copy()) for name, each in zip(self._trained, self._reducer.residuals, strict=True) if each is not None}

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the residuals that this member had in another group, or of its checkpoint. Call it between passes.

        Args:
            state: as `compression_state_dict` returns it; a parameter that it lacks begins without a residual.

        Raises:
            ArgumentError: a name without a parameter, another shape or dtype, a value that is not finite, or residuals where there is no
                compressor; nothing has changed. ArgumentTypeError: `state` is no mapping.

        >>> group, _ = groups
        >>> ddp = dist.DistributedDataParallel(ag.nn.Linear(2, 1), group, compress=dist.Blockwise(8))
        >>> ddp.load_compression_state_dict({"weight": ag.zeros(1, 2)})
        >>> ddp.compression_state_dict()
        {'weight': tensor([[0., 0.]])}
        """
        what, reducer = "DistributedDataParallel.load_compression_state_dict", self._reducer
        if not isinstance(state, Mapping):
            raise ArgumentTypeError(f"{what}: expected the result of compression_state_dict(), found {type(state).__name__}")
        if state and reducer.compress is None:
            raise ArgumentError(f"{what}: found residuals of {len(state)} parameters, but this was made without compress=, which uses them")
        unknown = sorted(set(state) - set(self._trained))
        if unknown:
            raise ArgumentError(f"{what}: found {', '.join(unknown)}, which are no parameters here; expected some of {', '.join(self._trained)}")
        residuals: list[Any] = [None] * len(self._trained)
        for index, (name, spec) in enumerate(zip(self._trained, reducer.buckets.specs, strict=True)):
            if name in state:
                residuals[index] = values = np.array(asarray(state[name]).detach().cpu()._data)
                if ParameterSpec(values.shape, values.dtype) != spec:
                    raise ArgumentError(f"{what}: {name} is {values.dtype}{list(values.shape)}; expected {spec.dtype}{list(spec.shape)}")
                if not np.isfinite(values).all():
                    raise ArgumentError(f"{what}: {name} has values that are not finite")
        reducer.residuals = residuals

    def detach(self) -> None:
        """Leave the module's gradients alone from now on. Idempotent."""
        self._reducer.detach()

    # ---------------------------------------------------------------- as the module

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return bool(self.module.training)

    def train(self, mode: bool = True) -> Self:
        """Set the module to training or evaluation, see `aiograd.nn.Module.train`.

        Args:
            mode: True for training.

        Returns:
            This object.
        """
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module to evaluation.

        Returns:
            This object.
        """
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """See `aiograd.nn.Module.parameters`.

        Args:
            recurse: False: without modules inside of the module.

        Returns:
            An iterator over Parameters.
        """
        return iter(self.module.parameters(recurse))

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        """See `aiograd.nn.Module.named_parameters`; the names are the module's.

        Args:
            prefix: path of the module.
            recurse: False: without modules inside of the module.

        Returns:
            An iterator over pairs of path and Parameter.
        """
        return iter(self.module.named_parameters(prefix, recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Any]:
        """See `aiograd.nn.Module.buffers`.

        Args:
            recurse: False: without modules inside of the module.

        Returns:
            An iterator over Tensors.
        """
        return iter(self.module.buffers(recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        """See `aiograd.nn.Module.named_buffers`; the names are the module's.

        Args:
            prefix: path of the module.
            recurse: False: without modules inside of the module.

        Returns:
            An iterator over pairs of path and Tensor.
        """
        return iter(self.module.named_buffers(prefix, recurse))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or fill them with zeros.

        Args:
            set_to_none: False: fill with zeros.
        """
        self.module.zero_grad(set_to_none)

    def state_dict(self, prefix: str = "") -> dict[str, Any]:
        """See `aiograd.nn.Module.state_dict`: the module's own, which fits the module without this around it.

        Args:
            prefix: put before each path.

        Returns:
            Tensors by path.
        """
        state: dict[str, Any] = self.module.state_dict(prefix)
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """See `aiograd.nn.Module.load_state_dict`. Load on all members, or on rank 0 and await `synchronize` on all.

        Args:
            state: Tensors or arrays by path.
            strict: True if paths that are missing or unexpected are an error.

        Returns:
            The paths that were missing or unexpected.
        """
        return self.module.load_state_dict(state, strict)


def _outline_of_data(data: Any) -> list[str]:
    """A line for each property in which loaders must be alike."""
    if data is None:
        return ["no data"]
    return [
        f"{len(data.source)} examples" if hasattr(data.source, "__len__") else "a stream",
        "batches of a sampler" if data.batch_sampler is not None else f"batches of {data.batch_size}",
        "its last batch only if it is full" if data.drop_last else "a last batch of any size",
        "another order for every epoch" if data.shuffle else "the order of the source",
        "a generator" if data.generator is not None else "no generator",
    ]


def _without_draws(place: dict[str, Any]) -> dict[str, Any]:
    """A place in the data without its generator of draws, which may differ between members before they meet."""
    return {name: value for name, value in place.items() if name != "draws"}


def _nothing() -> None:
    pass
