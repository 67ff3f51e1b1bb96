"""Tiers: programs of numpy calls run until the native ones are ready.

Note [When a program becomes native]
    After so many runs its code is given to one thread of the process, which makes native functions of it and puts them in the place of the
    numpy functions, between two calls. No call waits for it. The thread ends when it has nothing to do, and at the end of the process, after the
    job that it is at.

Note [Simulated time]
    On a simulated loop nothing may depend on how long real work takes, so no program is given to the thread there; with ``tier="native"`` the call
    that records it makes its native functions itself. Programs that are native already stay so: the bits are the same.
"""

from __future__ import annotations

import atexit
import functools
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.compiler import memory_guards
from aiograd.compiler.arena import ArenaPool
from aiograd.compiler.calls import ArrayCode
from aiograd.compiler.forward_code import arranged_natively
from aiograd.compiler.joint_pass import joint_function
from aiograd.compiler.native.cache import code_cache
from aiograd.compiler.native.elementwise import IS_X86
from aiograd.compiler.native.machine import LoadedCode, llvm_problem
from aiograd.compiler.native.marks import PYTHON, marks_of
from aiograd.compiler.native.objects import builtin_function, layout_problem
from aiograd.compiler.native.partition import NativeParts, native_function
from aiograd.compiler.native.ufuncs import ufunc_problem
from aiograd.compiler.passes import NATIVE_PASSES, optimized
from aiograd.compiler.source import SourceFile
from aiograd.engine.run.loop import running_loop
from aiograd.errors import ArgumentError
from aiograd.running.caller import warn_caller

TIERS = ("auto", "numpy", "native")
#: runs after which a program becomes native
HOT = 20


def native_problem() -> str | None:
    """Why no program can be native in this process; None if they can."""
    if not IS_X86:
        return f"native programs read the floating-point flags of x86-64; this is {platform.machine()}"
    return layout_problem() or ufunc_problem() or llvm_problem()


def default_tier() -> str:
    """The tier that the environment asks for."""
    tier = os.environ.get("AIOGRAD_COMPILE_TIER", "auto")
    if tier not in TIERS:
        raise ArgumentError(f"AIOGRAD_COMPILE_TIER={tier!r}: expected one of {', '.join(TIERS)}")
    return tier


def is_simulated() -> bool:
    """True on a simulated loop; see Note [Simulated time]."""
    return hasattr(running_loop(), "aiograd_submit")


class NativeCompiler:
    """Runs jobs one after the other on a thread, which ends when there are none."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job when the ones before it are done."""
        with self._lock:
            self._jobs.append(job)
            self._start()

    def _start(self) -> None:
        if self._thread is None and self._jobs:
            self._thread = threading.Thread(target=self._work, name="aiograd-compiler", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # a job has failed; its error is told by the thread's end
                    self._thread = None
                    self._start()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def threads(self) -> list[threading.Thread]:
        """Its thread, if there is one now: it belongs to the process."""
        thread = self._thread
        return [] if thread is None else [thread]

    def stop(self) -> None:
        """Drop the jobs that wait, and wait for the one that runs: LLVM must not be unloaded below it."""
        with self._lock:
            self._jobs.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def forget(self) -> None:
        """Drop jobs and thread, in a forked child."""
        self._jobs.clear()
        self._lock = threading.Lock()
        self._thread = None


compiler = NativeCompiler()
atexit.register(compiler.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=compiler.forget)


@dataclass(repr=False)
class NativeReport:
    """The native part of a program.

    Attributes:
        groups: the number of loops and calls of numpy's loops.
        fallbacks: calls that stay Python, with the reason, and the user's line.
        source: text of LLVM.
        seconds: that it took to make, of one core.
        failed: the error that has ended the making; empty: none.
        forward: the code of the forward; None: all of it is numpy calls.
    """

    parts: NativeParts = field(default_factory=NativeParts)
    seconds: float = 0.0
    failed: str = ""
    forward: ArrayCode | None = None

    def __repr__(self) -> str:
        return f"<native part: {len(self.groups)} loops and calls, {len(self.fallbacks)} kinds of calls in Python, made in {self.seconds:.3f} s>"

    def joined(self, others: list[NativeReport]) -> NativeReport:
        """One report of several programs."""
        if not others:
            return self
        every = [self, *others]
        fallbacks = {name: line for each in every for name, line in each.fallbacks.items()}
        parts = NativeParts([text for each in every for text in each.parts.texts], fallbacks)
        failed = "; ".join([each.failed for each in every if each.failed])
        return NativeReport(parts, sum([each.seconds for each in every]), failed)

    def marks(self, names: list[str]) -> dict[str, str]:
        """By name of a value, how the statement that makes it runs; see `aiograd.compiler.native.marks`.

        Args:
            names: of all values of the program.
        """
        if self.forward is None:
            return dict.fromkeys(names, PYTHON)
        calls = set(map(id, self.forward.calls))
        natives = [text.native for text in self.parts.texts if not calls.isdisjoint(map(id, text.native.code.calls))]
        return marks_of(self.forward, natives, names)

    @property
    def groups(self) -> tuple[Any, ...]:
        """Loops and calls of loops, in order."""
        return tuple([item for text in self.parts.texts for item in text.native.items])

    @property
    def fallbacks(self) -> dict[str, str]:
        """By call that stays Python and the reason, the user's line."""
        return self.parts.fallbacks

    @property
    def source(self) -> str:
        """The text of LLVM."""
        return "\n".join([text.text for text in self.parts.texts])


@functools.cache
def compare_guards_natively() -> None:
    """Have guards of programs compared in memory from now on, see `aiograd.compiler.memory_guards`; once in a process."""
    if memory_guards.layout_problem() is None:
        loaded = LoadedCode(code_cache.code_of(memory_guards.TEXT)[0])
        memory_guards.use(builtin_function("unchanged", loaded.address_of(memory_guards.NAME), (loaded,)))


class NativeTier:
    """Makes the native functions of one program.

    Args:
        code: the program's code, a `ProgramCode`; it is held weakly.
        plain: the code of the forward, before any pass.
        seed: of the pass that always follows, see `aiograd.compiler.joint_pass`; None: there is none.
        is_dynamic: True for machine code that programs of other sizes share, see `aiograd.compiler.native.writer`.
    """

    def __init__(self, code: Any, plain: ArrayCode, seed: Any = None, *, is_dynamic: bool = False) -> None:
        self._code = weakref.ref(code)
        self._seed = seed
        self._joined: ArrayCode | None = None if seed is None else plain
        self._forward: ArrayCode | None = plain
        self._waiting: dict[Any, tuple[ArrayCode, set[str]]] = {}
        self._lock = threading.Lock()
        self._has_begun = False
        self._file = SourceFile()
        self.report = NativeReport(NativeParts(is_dynamic=is_dynamic))
        #: runs before the native forward was there; None: it is not
        self.runs_before: int | None = None

    def add(self, key: Any, plain: ArrayCode, shared: set[str]) -> None:
        """Take the code of a backward; see `ProgramCode.add_backward`."""
        with self._lock:
            self._waiting[key] = plain, shared
            has_begun = self._has_begun
        if has_begun:
            code = self._code()
            if code is not None and code.tier == "native":
                self._work()
            elif not is_simulated():
                compiler.submit(self._work)

    def ask(self) -> None:
        """Have the native functions made soon; see Note [Simulated time]."""
        code = self._code()
        if code is not None and is_simulated():
            code.hot += HOT
        else:
            compiler.submit(self.begin)

    def begin(self) -> None:
        """Make the native functions of forward and backwards."""
        with self._lock:
            self._has_begun = True
        self._work()

    def _work(self) -> None:
        code = self._code()
        if code is None:
            return
        if native_problem() is not None:
            code.native = None
            return
        try:
            with Timed(self.report), np.errstate(all="ignore"):
                self._make(code)
        except Exception as error:
            note_failure(self.report, code.name, error)

    def _make(self, code: Any) -> None:
        compare_guards_natively()
        program, parts = code.program, self.report.parts
        if self._forward is not None:
            plain, self._forward = self._forward, None
            arranged, inside = arranged_natively(program, plain)
            function = native_function(arranged, self._file, parts)
            if function is not None:
                code.inside = code.inside | inside
                for key, shared in list(code.shared.items()):  # a pass in another thread may add to them; it sees `inside` as it is now
                    if key in code.backwards and not code.inside.isdisjoint(shared):
                        code.set_backward(key, code.backwards[key], shared)
                code.forward = function, ArenaPool(arranged.arena)
                program.arena_bytes = code.forward[1].arena_bytes
                self.report.forward, self.runs_before = arranged, code.runs
        while True:
            with self._lock:
                if not self._waiting:
                    break
                key, (plain, shared) = self._waiting.popitem()
            function = native_function(optimized(plain, NATIVE_PASSES), self._file, parts)
            if function is not None:
                code.set_backward(key, function, shared)
            if self._joined is not None and key == (((),), code.joint_needs, code.all_needed):
                joined, self._joined = self._joined, None
                code.joint = joint_function(joined, plain, self._seed, is_dynamic=parts.is_dynamic)
        if parts.texts:
            program.report = self.report


class Timed:
    """Counts the processor time of a block into a report."""

    def __init__(self, report: NativeReport) -> None:
        self._report = report

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: Any) -> None:
        self._report.seconds += time.thread_time() - self._began


def note_failure(report: NativeReport, name: str, error: BaseException) -> None:
    """Say once that a program could not be made native; it runs numpy calls."""
    report.failed = f"{type(error).__name__}: {error}"
    warn_caller(
        f"the compiled function {name} stays a program of numpy calls: making it native failed with {report.failed}. This is a defect of aiograd."
    )
