"""The fault model: what can go wrong, what is promised all the same, and which tests hold it to that.

Everywhere: gradients that were committed are those of the same graph in one process, each contribution counted once; a pass that failed has
changed nothing; every await returns or raises an error of aiograd's within its deadline and a heartbeat; nothing is left behind; the next pass
succeeds without anybody being restarted. The promise of a row comes on top of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Fault(NamedTuple):
    """One row.

    Attributes:
        fault: what goes wrong.
        promise: what is promised, beyond what holds everywhere.
        tests: ``file::function`` below ``tests``.
        chaos: parts of ``make chaos`` that look for it in many seeds or real processes.
    """

    fault: str
    promise: str
    tests: tuple[str, ...]
    chaos: tuple[str, ...] = ()


FAULTS: Mapping[int, Fault] = {
    1: Fault(
        "a worker is killed during a forward call, at any point",
        "the caller gets WorkerLostError at once after a crash, and within 1.5 s where nothing closes the connection",
        (
            "distributed/test_peer.py::test_a_crash_is_noticed_at_once",
            "distributed/test_peer.py::test_a_silent_peer_is_lost",
            "distributed/test_cluster.py::test_a_killed_worker_is_noticed_and_can_be_restarted",
            "distributed/test_endpoint_sim.py::test_requests_run_at_most_once_and_end_in_time_whatever_happens",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
            "distributed/test_chaos.py::test_workers_that_are_killed",
        ),
        ("seeds", "cells", "processes"),
    ),
    2: Fault(
        "a worker is killed during a backward pass, at any point, the commit included",
        "committed everywhere, or nowhere, or reported as CommitUnknown with the names of the workers; never counted twice",
        (
            "coordination/test_fault_matrix.py::test_a_fault_at_a_moment",
            "distributed/test_commit.py::test_a_prepared_worker_that_is_lost_after_the_decision_is_named",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
            "distributed/test_chaos.py::test_workers_that_are_killed",
        ),
        ("seeds", "cells", "processes"),
    ),
    3: Fault(
        "the worker that opened a context or started a pass is killed",
        "the others abort or settle its passes at once and drop its contexts when their lease ends; contexts of others do not notice",
        (
            "coordination/test_fault_matrix.py::test_a_fault_at_a_moment",
            "distributed/test_leases.py::test_contexts_of_a_dead_worker_are_dropped_when_their_lease_ends",
            "distributed/test_leases.py::test_other_contexts_do_not_notice",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
            "distributed/test_chaos.py::test_workers_that_are_killed",
        ),
        ("seeds", "cells", "processes"),
    ),
    4: Fault(
        "a message is lost with its connection",
        "it is sent again under its number over the next one until the deadline, then the error says that it was late",
        (
            "distributed/test_session_schedules.py::test_whatever_the_link_does",
            "distributed/test_session.py::test_a_message_cut_by_the_end_of_its_channel_is_completed_over_the_next",
            "distributed/test_session.py::test_what_is_sent_again_after_channels_that_break_soon_is_bounded",
            "coordination/test_fault_matrix.py::test_a_fault_at_a_moment",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
        ),
        ("seeds", "cells"),
    ),
    5: Fault(
        "a message comes again over the next connection: while the first runs, after it, or after its context is gone",
        "it joins the first or gets the stored answer; a late one is told that the context was released and opens nothing",
        (
            "distributed/test_session_states.py::test_answerer",
            "distributed/test_commit.py::test_a_second_commit_joins_the_first_and_counts_nothing_twice",
            "distributed/test_contexts.py::test_a_released_context_is_named_as_such_to_those_who_used_it",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
        ),
        ("seeds", "cells", "ablations"),
    ),
    6: Fault(
        "messages overtake each other: short ones long ones, and those of different connections",
        "the result does not depend on their order; nothing is confirmed before it is done",
        (
            "distributed/test_session_schedules.py::test_whatever_the_link_does",
            "distributed/test_backward_failures.py::test_an_abort_that_overtakes_the_walk_is_remembered",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds", "ablations"),
    ),
    7: Fault(
        "bytes are altered, cut off or mixed up on their way",
        "refused by the seal of the record; the connection is closed, and what was lost is sent again over a new one",
        (
            "distributed/test_cipher.py::test_no_byte_can_be_altered",
            "distributed/test_peer.py::test_altered_bytes_close_the_connection_and_nothing_is_lost",
            "distributed/test_frames.py::test_damaged_frames_are_refused_and_nothing_else",
            "distributed/test_codec.py::test_damaged_messages_are_values_or_refused_and_nothing_else",
            "distributed/test_chaos.py::test_workers_behind_proxies_that_do_harm",
        ),
        ("seeds", "proxied"),
    ),
    8: Fault(
        "the work is done and its answer is lost",
        "asking again gets the stored answer; nothing is computed or applied a second time",
        (
            "distributed/test_session_states.py::test_answerer",
            "coordination/test_fault_matrix.py::test_a_fault_at_a_moment",
            "distributed/test_distributed_optimizer.py::test_a_step_is_taken_once_however_often_it_is_asked_for",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
        ),
        ("seeds", "cells", "proxied"),
    ),
    9: Fault(
        "a worker, a device or a connection is slow",
        "deadlines hold, others do not wait for it, and what piles up is bounded",
        (
            "distributed/test_session.py::test_one_slow_request_does_not_keep_the_answers_of_others",
            "distributed/test_calls.py::test_def_functions_do_not_hold_the_loop",
            "distributed/test_calls.py::test_a_device_that_is_slow_delays_only_its_own_call",
            "distributed/test_http_channel.py::test_a_peer_that_reads_a_trickle_is_dropped_and_a_slow_one_is_not",
            "distributed/test_chaos.py::test_workers_behind_proxies_that_do_harm",
            "distributed/test_chaos.py::test_workers_that_are_stopped_and_ended",
        ),
        ("seeds", "proxied", "processes"),
    ),
    10: Fault(
        "a worker is frozen, or its connection is half open",
        "found out within three missed heartbeats, which are 1.5 s",
        (
            "distributed/test_peer.py::test_a_silent_peer_is_lost",
            "distributed/test_peer.py::test_a_newer_link_takes_the_place_of_one_whose_end_was_not_noticed",
            "distributed/test_peer.py::test_a_worker_that_was_frozen_does_not_take_its_peers_for_dead",
            "distributed/test_chaos.py::test_workers_that_are_stopped_and_ended",
        ),
        ("seeds", "cells", "processes"),
    ),
    11: Fault(
        "the network is partitioned, in both directions or in one, and heals",
        "no split decision; what was undecided is settled once it heals, and work goes on",
        (
            "coordination/test_fault_matrix.py::test_a_fault_at_a_moment",
            "distributed/test_commit.py::test_who_cannot_reach_the_initiator_learns_of_the_commit_from_others",
            "distributed/test_peer.py::test_unreachable_for_a_moment",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
        ),
        ("seeds", "cells"),
    ),
    12: Fault(
        "a connection is reset in the middle of a frame; a worker is restarted at the same address",
        "the session goes on over a new connection with new keys; a restarted worker is another one, and nothing meant for the first reaches it",
        (
            "distributed/test_peer.py::test_requests_survive_resets_and_run_once",
            "distributed/test_peer.py::test_a_restarted_peer_is_another_one",
            "coordination/test_fault_matrix.py::test_a_fault_at_a_moment",
            "distributed/test_cluster.py::test_a_running_worker_can_be_restarted",
            "distributed/test_chaos.py::test_workers_behind_proxies_that_do_harm",
            "distributed/test_chaos.py::test_every_fault_at_every_point",
        ),
        ("seeds", "cells", "proxied"),
    ),
    13: Fault(
        "the caller cancels a pass, at any await",
        "CancelledError comes out, the pass is aborted on every worker, and what was staged is freed; or it was committed, and the error says so",
        (
            "distributed/test_backward_cancellation.py::test_cancelled_at_every_step",
            "distributed/test_backward_cancellation.py::test_cancelled_again_while_it_is_being_cancelled",
            "distributed/test_calls.py::test_cancelling_a_call_cancels_what_runs_for_it_two_workers_away",
            "distributed/test_chaos.py::test_a_pass_that_is_cancelled_before_each_of_its_steps",
        ),
        ("seeds", "cancel"),
    ),
    14: Fault(
        "time runs out at any point; timeouts are nested or meet a cancellation",
        "one error, the right one; an outer cancellation is not swallowed; deadlines shrink from worker to worker",
        (
            "distributed/test_backward_cancellation.py::test_a_timeout_at_any_time",
            "distributed/test_backward_cancellation.py::test_of_two_timeouts_the_right_one_ends_the_pass",
            "distributed/test_backward_cancellation.py::test_a_cancellation_is_not_lost_in_a_timeout",
            "distributed/test_calls.py::test_a_deadline_shrinks_from_worker_to_worker",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds",),
    ),
    15: Fault(
        "several passes on shared parameters at the same time; several contexts",
        "each is exact, and contexts keep their gradients apart",
        (
            "distributed/test_backward.py::test_passes_of_several_contexts_on_shared_parameters_run_at_the_same_time",
            "distributed/test_backward.py::test_passes_of_one_context_run_one_after_the_other",
            "distributed/test_contexts.py::test_contexts_that_meet_at_one_parameter_keep_their_gradients_apart",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds",),
    ),
    16: Fault(
        "a function or rule raises anything at all, returns nonsense, returns too late or never",
        "its request fails and the error names it; what comes late is dropped; stuck threads are counted, limited, and keep no process alive",
        (
            "distributed/test_broken_functions.py::test_whatever_a_function_raises_fails_its_call_and_nothing_else",
            "distributed/test_broken_functions.py::test_whatever_a_rule_raises_fails_the_pass_everywhere_and_nothing_else",
            "distributed/test_broken_functions.py::test_a_rule_that_returns_nonsense_is_named",
            "distributed/test_broken_functions.py::test_a_function_that_never_returns_ends_at_its_deadline_and_holds_one_thread_and_nothing_else",
            "distributed/test_broken_functions.py::test_a_rule_that_never_returns_ends_the_pass_at_its_deadline_and_its_late_result_changes_nothing",
            "distributed/test_broken_functions.py::test_functions_that_never_return_do_not_gather_threads",
            "distributed/test_shutdown.py::test_a_worker_that_is_told_to_end_in_the_middle_of_its_work_ends_quickly_and_tells_its_peers",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds",),
    ),
    17: Fault(
        "a device has no memory left, or a kernel fails",
        "the pass fails and nothing of it stays; the worker and the device go on",
        (
            "distributed/test_broken_devices.py::test_a_kernel_that_fails_fails_its_pass_and_the_worker_goes_on",
            "distributed/test_broken_devices.py::test_memory_that_is_full_is_an_error_of_the_call_and_what_was_allocated_is_free_again",
            "distributed/test_broken_devices.py::test_gradients_that_do_not_reach_the_device_fail_the_pass",
        ),
    ),
    18: Fault(
        "a device is broken for good",
        "it gives no numbers any more, only errors that say so; what runs on the host goes on",
        ("distributed/test_broken_devices.py::test_a_poisoned_device_gives_no_numbers_any_more_and_the_host_goes_on",),
    ),
    19: Fault(
        "a process or its loop ends in the middle of a pass: SIGTERM, SIGINT, the end of main, loop.stop",
        "it ends within five seconds, without a warning, and its peers are told rather than left to find out",
        (
            "distributed/test_shutdown.py::test_a_worker_that_is_told_to_end_in_the_middle_of_its_work_ends_quickly_and_tells_its_peers",
            "distributed/test_shutdown.py::test_a_loop_that_ends_in_the_middle_of_a_pass",
            "distributed/test_shutdown.py::test_a_function_that_exits_ends_its_call_and_not_its_worker",
            "distributed/test_shutdown.py::test_a_worker_that_is_closed_says_so_to_those_for_whom_it_works",
            "distributed/test_cluster.py::test_leaving_while_a_worker_is_busy_takes_no_longer_than_the_grace",
        ),
        ("processes",),
    ),
    20: Fault(
        "memory runs out, at any allocation on the way of a message or in a function",
        "one request fails or is repeated; the process lives and budgets are given back",
        (
            "distributed/test_out_of_memory.py::test_an_allocation_that_fails_costs_one_request_at_most",
            "distributed/test_out_of_memory.py::test_an_allocation_that_fails_where_bytes_arrive_breaks_a_connection_at_most",
            "distributed/test_out_of_memory.py::test_a_process_with_little_memory_refuses_what_does_not_fit_and_goes_on",
            "distributed/test_session_limits.py::test_out_of_memory_refuses_the_one_request",
        ),
    ),
    21: Fault(
        "a process has no file descriptors left",
        "what is connected goes on, who is new waits or is refused, and all is well when there are some again",
        (
            "distributed/test_descriptors.py::test_running_out_of_descriptors_and_coming_back",
            "distributed/test_http_hardening.py::test_running_out_of_descriptors_is_survived",
        ),
    ),
    22: Fault(
        "malformed HTTP, WebSocket frames or messages",
        "refused with a 4xx or a close; no crash, no 5xx, nothing unhandled",
        (
            "distributed/test_http_hardening.py::test_malformed_requests",
            "distributed/test_http_hardening.py::test_random_requests_are_refused_and_nothing_else_happens",
            "distributed/test_http_hardening.py::test_random_bytes_on_an_open_channel",
            "distributed/test_http_channel.py::test_random_bytes_never_raise",
            "distributed/test_frames.py::test_each_malformation_has_its_code",
            "distributed/test_codec.py::test_each_malformation_has_its_code",
        ),
    ),
    23: Fault(
        "oversized requests, endless headers, compressed or empty bombs, deep nesting, announced totals",
        "refused before anything is allocated: at most two messages and a MiB beside what there was",
        (
            "distributed/test_hostile_peers.py::test_whatever_a_peer_sends_takes_two_messages_of_memory_at_most",
            "distributed/test_hostile_peers.py::test_requests_without_end_are_refused_before_they_are_stored",
            "distributed/test_codec.py::test_memory_of_a_hostile_message_is_bounded",
            "distributed/test_http_hardening.py::test_compression_is_not_negotiated",
        ),
    ),
    24: Fault(
        "peers that are slow on purpose: heads, handshakes and frames that do not come, idle connections, no reading",
        "hung up on in time, before the handshake and after it; others do not notice",
        (
            "distributed/test_hostile_peers.py::test_who_stops_before_the_end_of_the_handshake_is_hung_up_on_in_time_and_others_do_not_notice",
            "distributed/test_hostile_peers.py::test_who_stops_after_the_handshake_is_dropped_in_time_and_others_do_not_notice",
            "distributed/test_http_hardening.py::test_a_head_that_does_not_come_closes_the_connection",
            "distributed/test_http_hardening.py::test_many_idle_connections_are_gone_in_time",
            "distributed/test_http_hardening.py::test_a_peer_that_never_reads_is_dropped_and_others_go_on",
        ),
    ),
    25: Fault(
        "callers without a key, with a wrong, removed or foreign one, with recordings, with altered bytes, meaning another worker",
        "all refused, with the same bytes or none, and without a trace: nothing runs and nothing is made",
        (
            "distributed/test_intruders.py::test_an_attack_is_refused_without_a_word_and_without_a_trace",
            "distributed/test_intruders.py::test_all_refusals_are_the_same_bytes_on_the_wire",
            "distributed/test_intruders.py::test_paths_answer_strangers_and_those_who_have_a_key_alike",
            "distributed/test_intruders.py::test_a_key_that_is_removed_lets_nobody_in_any_more",
            "distributed/test_handshake.py::test_a_wrong_hello_is_refused",
            "distributed/test_handshake.py::test_no_byte_of_the_hello_can_be_altered",
        ),
    ),
    26: Fault(
        "ids of contexts or references are guessed or leaked",
        "to another principal they are like ids that do not exist, for reading, writing, aborting and releasing",
        (
            "distributed/test_intruders.py::test_ids_of_another_tenant_are_no_better_than_invented_ones",
            "distributed/test_intruders.py::test_references_of_another_tenant_are_no_better_than_invented_ones",
            "distributed/test_foreign_contexts.py::test_a_message_about_a_foreign_context_is_answered_as_one_about_a_context_that_never_was",
            "distributed/test_references.py::test_objects_belong_to_the_principal_that_had_them_made",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds",),
    ),
    27: Fault(
        "workers of different releases",
        "they agree on a version or part at the handshake, each told both ranges; never in the middle of a pass",
        (
            "distributed/test_versions.py::test_every_pair_works_or_parts_at_the_handshake",
            "distributed/test_versions.py::test_a_frame_of_another_version_ends_its_connection_and_a_pass_is_not_touched",
            "distributed/test_handshake.py::test_the_highest_common_version_is_chosen_or_both_learn_why_not",
            "distributed/test_frames.py::test_golden_headers_of_version_5",
            "distributed/test_codec.py::test_golden_messages",
        ),
    ),
    28: Fault(
        "clocks differ or jump",
        "deadlines and leases are durations; nothing between workers reads the time of day",
        (
            "distributed/test_clocks.py::test_nothing_between_workers_reads_the_time_of_day",
            "distributed/test_clocks.py::test_a_clock_that_jumps_changes_nothing",
            "distributed/test_clocks.py::test_clocks_that_differ_change_nothing",
        ),
    ),
    29: Fault(
        "more than a worker takes: calls, passes, contexts, bytes, jobs",
        "what is too much is refused at once with Overloaded, what was admitted ends well, and afterwards all is as before",
        (
            "distributed/test_overload.py::test_what_is_too_much_is_refused_at_once_and_what_was_admitted_ends",
            "distributed/test_overload.py::test_passes_above_capacity_are_exact_or_refused_and_never_in_doubt",
            "distributed/test_overload.py::test_a_decision_that_finds_no_room_is_told_again",
            "distributed/test_overload.py::test_more_functions_than_the_executor_takes_wait_and_what_is_above_the_requests_of_a_peer_is_refused_at_once",
            "distributed/test_overload.py::test_a_peer_that_takes_all_it_can_get_leaves_others_their_share",
        ),
    ),
    30: Fault(
        "everybody tries again at the same time",
        "attempts are spaced and jittered, and the traffic of repetitions is bounded",
        (
            "distributed/test_session.py::test_what_is_sent_again_after_channels_that_break_soon_is_bounded",
            "distributed/test_peer.py::test_attempts_to_reach_a_peer_are_spaced",
            "distributed/test_peer.py::test_a_connection_that_breaks_again_and_again_is_tried_less_often",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds",),
    ),
    31: Fault(
        "an expert of a mixture is lost, slow, or answers NaN",
        "an error by default; where losses are allowed, the same experts count forward and backward, and the result says which were lost",
        (
            "distributed/moe/test_call_many.py::test_by_default_a_loss_is_an_error_that_names_sample_and_expert",
            "distributed/moe/test_call_many.py::test_everybody_is_waited_for_and_stragglers_only_so_long",
            "distributed/moe/test_call_many.py::test_an_expert_lost_in_backward_is_an_error_or_its_share_is_taken_by_the_others",
            "distributed/moe/test_call_many.py::test_anomalies_are_failures",
            "distributed/moe/test_serving.py::test_a_mixture_goes_on_without_a_lost_worker_where_it_may",
        ),
    ),
    32: Fault(
        "remote results that the loss does not use",
        "the pass does not wait for them; in fast mode it fails at its deadline and names the message",
        (
            "distributed/test_backward.py::test_workers_whose_results_are_not_needed_have_no_part_in_the_pass",
            "distributed/test_graph_edges.py::test_inputs_that_do_not_matter_have_no_gradient",
            "distributed/test_backward_fast.py::test_an_unused_result_fails_at_the_deadline_and_names_the_message",
            "distributed/test_chaos.py::test_whatever_a_seed_does",
        ),
        ("seeds", "ablations"),
    ),
    33: Fault(
        "NaN and infinities in values or gradients",
        "carried bit by bit; anomaly mode names the node where they arise, on whatever worker",
        (
            "distributed/test_anomalies.py::test_any_bits_cross_in_values_and_gradients",
            "distributed/test_anomalies.py::test_anomaly_mode_names_the_node_where_a_nan_arises_on_whatever_worker",
        ),
    ),
    34: Fault(
        "hooks and callbacks raise; user code raises KeyboardInterrupt or SystemExit",
        "the pass fails cleanly, or the error says that it was committed; SystemExit ends its call; who is interrupted leaves its loop after its "
        "callers were answered",
        (
            "distributed/test_broken_functions.py::test_a_hook_that_raises_fails_the_pass_everywhere_and_nothing_else",
            "distributed/test_broken_functions.py::test_an_interrupt_in_a_rule_fails_the_pass_and_leaves_the_loop",
            "distributed/test_broken_functions.py::test_an_interrupt_leaves_the_loop_after_the_caller_was_answered",
            "distributed/test_backward_failures.py::test_an_error_after_the_commit_says_so_and_rolls_nothing_back",
        ),
        ("seeds",),
    ),
    35: Fault(
        "in a training with local steps a member is killed, cut off, frozen or late, its loss fails, members join or leave, or a round is cancelled",
        "base, outer optimizer, buffers and the place in the data change on all contributors of a round or nowhere, with the bits of one process; "
        "a lost member is left out, and its batches are read by others, each once",
        (
            "distributed/local_steps/test_round_faults.py::test_a_member_that_is_killed_is_left_out",
            "distributed/local_steps/test_round_faults.py::test_a_round_that_is_cancelled",
            "distributed/local_steps/test_lives_of_trainings.py::test_rounds_have_the_bits_of_one_process_whatever_fails",
        ),
        ("local-steps",),
    ),
}


def table() -> str:
    """The model as a table in Markdown."""
    lines = ["| what goes wrong | what is promised |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {row.fault} | {row.promise} |" for row in FAULTS.values())])
