"""Safeguards: the switches that tests use to see that each protection is needed and that its absence is noticed.

Users never touch them. Everything is on unless a simulated network was made with some of them off.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Safeguards:
    """One flag per protection; False removes it."""

    #: a request that arrives again joins the running one or gets the stored answer
    dedupe: bool = True
    #: a request counts as known from its arrival, not only from its completion
    dedupe_running: bool = True
    #: frames carry a checksum
    checksum: bool = True
    #: frames of an earlier session with the same peer are refused
    epoch_fence: bool = True
    #: ids of released contexts stay known for a while, so that late messages find out
    tombstone: bool = True
    #: only a call that says so opens a context
    open_only_by_call: bool = True
    #: an answer is sent after its effect, not before
    ack_after_apply: bool = True
    #: who asks is checked before anything is done
    authorize_first: bool = True
    #: a second COMMIT of the same pass changes nothing
    commit_idempotent: bool = True
    #: cancelling a call cancels what runs for it elsewhere
    propagate_cancel: bool = True
    #: what an executor returns after its pass was aborted is dropped
    fence_late_results: bool = True
    #: releasing a context ends the calls that run in it
    release_ends_calls: bool = True
    #: only send edges that the roots depend on are waited for
    mark_needed_edges: bool = True
    #: a retried request keeps its id
    retry_same_id: bool = True
    #: deadlines shrink on their way from worker to worker
    shrink_deadline: bool = True
    #: bytes of a failed message are given back
    return_budget: bool = True
    #: gradients become visible on all workers together or not at all
    atomic_commit: bool = True


ALL_ON = Safeguards()
