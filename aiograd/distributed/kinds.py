"""Kind: the kinds of requests between workers.

Every request is answered once, with a value or an error; the peer session ensures that (see `session`). Values are tuples of types
that the codec supports.

========== ===================================================================================================================
CALL       run an exposed function: (name, args, kwargs, records, context part or None) → (result, edge or 0), and the caller's edges that
           are all that is behind it where that is known
MARK       these of your send edges take part in a pass: (context, pass, edges) → (names of the workers that take part behind them,
           send edges of the asker that were reached). One more value, 0, where the pass wants only some inputs of its initiator; with 1
           instead these are recv edges that lead to them, and the answer has recv edges of the asker
GRADIENT   gradients of one send edge: (context, pass, bundle, flags, names, send edges that take part if no MARK has told them, place if the
           pass records a graph) → (names of workers, bundles for the asker, True if the receiver has nothing to commit and has left); the first one
           of a pass is answered when the receiver and everything behind it is prepared to commit, later ones at once
COMMIT     make the gradients of a pass visible: (context, pass) → True
ABORT      drop a pass: (context, pass, reason) → True
OUTCOME    what became of a pass: (context, pass) → a word
RELEASE    drop a context: (context,) → True
RENEW      these contexts are still in use: ([(context, sign of life), ...],) → True
RELAY      a message to many workers, by way of this one: (kind, [[name, message], ...]), its own first → [[name, failed, answer or error], ...] of
           those that were reached; see `multicast`
POST       values for an object of the receiver, which takes them at once: (its reference, [values], True if the sender waits for the answer) → None.
           Where the sender does not wait, the answer may go with the next message
COLLECTIVE something about a group of workers: (word, ...) → an answer that depends on the word; see `collectives.group_server`
========== ===================================================================================================================
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """The kind of a request; see the module."""

    CALL = 1
    MARK = 2
    GRADIENT = 3
    COMMIT = 4
    ABORT = 5
    OUTCOME = 6
    RELEASE = 7
    RENEW = 8
    COLLECTIVE = 9
    RELAY = 10
    POST = 11
