"""ModuleCoordinator: equal modules on several workers, each made with its optimizers and its member, as the coordinating process sees them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiograd.coordination.client import StepWording
from aiograd.coordination.coordinator import StepCoordinator
from aiograd.coordination.decisions import RemoteMember
from aiograd.coordination.session import StepWork
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.engine.run.failures import first_of
from aiograd.errors import ArgumentError


class RemoteModuleMember(RemoteMember, Protocol):
    """A member on a worker, with the module and the optimizers that it is made around."""

    @property
    def parts(self) -> Sequence[RemoteRef]:
        """References to these."""


P = TypeVar("P", bound=RemoteModuleMember)


class ModuleCoordinator(StepCoordinator[StepWork, P], Generic[P], ABC):
    """Modules that take steps together.

    Args:
        wording: the words of errors.
        worker: this process's worker.
        module_class, args: of the modules.
        timeout: seconds for each request; None: the worker's default.
    """

    def __init__(self, wording: StepWording, worker: Worker, module_class: Any, args: Sequence[Any], timeout: float | None) -> None:
        super().__init__(wording, timeout)
        self.worker = worker
        self._module_class = module_class
        self._args = args

    def find(self, name: str) -> P | None:
        """The member on a worker."""
        return next((each for each in self.remotes if each.owner == name), None)

    def find_removable(self, what: str, kind: str, name: str) -> P:
        """The member on a worker, which is not the only one.

        Args:
            what: the class that removes it.
            kind: the word for a member.
            name: of the worker.

        Raises:
            ArgumentError: there is none, or no other.
        """
        found = self.find(name)
        if found is None:
            names = ", ".join(each.owner for each in self.remotes) or "none"
            raise ArgumentError(f"{what}.remove({name!r}): there is no {kind} of this name; there are {names}")
        if len(self.remotes) == 1:
            raise ArgumentError(f"{what}.remove({name!r}): it is the last {kind}; call aclose() to end")
        return found

    async def make(self, names: Sequence[str]) -> list[P]:
        """Make members on workers. Cancelled or failed, none is left, as far as workers answer in time."""
        making = asyncio.get_running_loop().create_task(self._make_all(names), name="aiograd:modules:make")
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:  # a member that is being made can be dropped once it has a reference
            await asyncio.wait([making], timeout=current_engine().cancel_grace)
            await end([making], current_engine().cancel_grace)
            if not making.cancelled() and making.exception() is None:
                await self.drop(making.result())
            raise

    async def _make_all(self, names: Sequence[str]) -> list[P]:
        """Make members; all are awaited, even after a failure, since a member abandoned midway could not be dropped."""
        made = await asyncio.gather(*map(self._make, names), return_exceptions=True)
        failed = [(f"the worker {name}", each) for name, each in zip(names, made, strict=True) if isinstance(each, BaseException)]
        if failed:
            await self.drop([each for each in made if not isinstance(each, BaseException)])
            raise first_of(failed)
        return [each for each in made if not isinstance(each, BaseException)]

    @abstractmethod
    async def _make(self, name: str) -> P:
        """Make a member on a worker. Cancelled or failed, none is left."""

    async def drop(self, members: Sequence[P]) -> None:
        """Let workers forget members, as far as they can be reached."""
        await self._forget(ref for each in members for ref in (each.ref, *each.parts) if ref is not None)

    async def check_equal(self, members: Sequence[P]) -> None:
        """Raise unless the models of all are like the first one's; see `check_alike`."""
        await self.check_alike(members, f"replicas of {getattr(self._module_class, '__name__', self._module_class)}")

    async def aclose(self) -> None:
        """Let every worker forget its member. Unreachable workers are left alone."""
        refs = [ref for each in self.remotes for ref in each.parts]
        await super().aclose()
        await self._forget(refs)
