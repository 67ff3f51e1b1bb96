"""Ask a peer for the outcome of a transaction.

Note [No answer]
    A participant that is uncertain begins its next round of questions only when each question of the last one has ended in an event (see
    `aiograd.transaction.states`). So a question always ends in one: an error of any kind, such as a lost peer, an answer that is no outcome or too
    little memory for the request, is no answer, and the peer is asked again.
"""

from __future__ import annotations

from collections.abc import Awaitable

from aiograd.running.log_fields import structured_logger
from aiograd.transaction import Outcome, OutcomeReply, Unanswered

logger = structured_logger("aiograd.coordination")


async def ask_outcome(peer: str, answer: Awaitable[str]) -> OutcomeReply | Unanswered:
    """Await the answer to a question about the outcome. Cancelling cancels the question.

    Args:
        peer: name of the peer that is asked.
        answer: the request, which returns the value of an `Outcome`.

    Returns:
        The event for the transaction: the outcome as the peer knows it, or `Unanswered`; see Note [No answer].
    """
    try:
        return OutcomeReply(peer, Outcome(await answer))
    except Exception as error:
        logger.debug("no outcome from %s: %s: %s", peer, type(error).__name__, error)
        return Unanswered(peer)
