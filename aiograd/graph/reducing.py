"""LeafReducer: takes the gradients of leaves out of a pass, combines them with other processes' gradients and gives them back before the commit.

Note [Reduced leaves]
    A leaf with a reducer (`NodeExtra.reducer`) hands its complete gradient to it instead of staging it, while the rest of the pass goes on. The
    reducer joins the pass (`GraphTask.join`) and is asked twice at its end: to stage what became of the gradients, and, when everything is staged,
    to commit. So a pass over leaves that are shared with other processes stays one transaction.

    A pass that fails tells the reducers of all leaves that it would have reached, also of leaves that it had not reached yet: others may wait for
    them.
"""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from typing import Any, Protocol


class LeafReducer(Protocol):
    """Takes the gradients of leaves out of passes."""

    def take(self, task: Any, leaf: Any, grad: Any) -> bool:
        """Take the complete gradient of a leaf in a pass.

        Args:
            task: the GraphTask.
            leaf: the AccumulateGrad.
            grad: the gradient, which others may share; None: there is none.

        Returns:
            True: the reducer stages what becomes of it; False: the pass stages it as it is.
        """

    def pass_failed(self, task: Any, error: BaseException) -> None:
        """A pass has failed, which may have been one over leaves of this reducer.

        Args:
            task: the GraphTask.
            error: the reason.
        """


class CommitGuard(Protocol):
    """Takes part in the end of a pass."""

    def finish(self) -> Coroutine[Any, Any, None]:
        """Stage the gradients taken out of the pass. Awaited when no node is outstanding; where it raises or is cancelled, the pass fails."""

    def commit(self) -> Coroutine[Any, Any, None]:
        """Call `GraphTask.commit` if all others do so too. Awaited when everything is staged; where it raises, the pass fails."""


#: all that have been given to leaves; passes that fail tell them
LEAF_REDUCERS: weakref.WeakSet[Any] = weakref.WeakSet()
