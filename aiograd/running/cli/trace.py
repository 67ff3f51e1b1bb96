"""``aiograd trace``: merge Chrome traces, or print a table of one."""

from __future__ import annotations

import argparse

from aiograd.profiler import merge_traces, summarize_trace
from aiograd.running.cli.output import print_text


def trace(options: argparse.Namespace) -> int:
    """Merge the traces and print where their time went."""
    merged = merge_traces(options.traces, options.output)
    print_text(summarize_trace(merged, limit=options.limit))
    if options.output is not None:
        print(f"\nwrote {options.output}: open it in https://ui.perfetto.dev")
    return 0
