"""The demo from beginning to end: its events in their order, and its checks. Every number that is printed has been measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiograd.distributed import Cluster, DataParallel, Worker
from aiograd.errors import AiogradError, CommitUnknown, DistributedError, StepError, WorkerLostError
from aiograd.profiler import merge_traces, profile
from aiograd.running.cli.demo.alone import RATE, accuracy, rate
from aiograd.running.cli.demo.clusters import Pids, cluster_on
from aiograd.running.cli.demo.data import Digits
from aiograd.running.cli.demo.display import Bar, Display, megabytes
from aiograd.running.cli.demo.model import Network
from aiograd.running.cli.demo.training import Checkpoint, Training
from aiograd.running.scalars import log
from aiograd.tensors.creation import asarray
from aiograd.tensors.tensor import Tensor

SEED = 0
#: epochs after which the network has to be as good as `PROMISED`
EPOCHS = 30
PROMISED = 0.97
#: batches at the end that are profiled
PROFILED = 2
#: seconds that training alone may take
PATIENCE = 1800.0
#: the worker that trains the same network alone
ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    epochs: int = EPOCHS
    workers: int = 2
    kill: bool = True
    on: str = "local"
    output: Path = Path("out/demo")


async def show(options: Options, display: Display | None = None) -> int:
    """Run the demo; returns 0 if everything it promises was so, else 1.

    Cancelling it ends the worker processes.

    Raises:
        AiogradError: scikit-learn is not installed, a worker does not start. OSError: the trace cannot be written.
    """
    display = display or Display()
    began = time.perf_counter()
    digits = Digits.load()
    options.output.mkdir(parents=True, exist_ok=True)
    names = [f"worker{i}" for i in range(options.workers)]
    processes = "one worker process" if options.workers == 1 else f"{options.workers} worker processes"
    display.say(f"aiograd demo: a network cut across {processes} learns to read handwritten digits")
    async with cluster_on(options.on, [*names, ALONE]) as (cluster, pids):
        demo = _Demo(options, display, digits, cluster, pids, names)
        await demo.introduce()
        await demo.compare_gradients()
        alone = asyncio.create_task(demo.train_alone(), name="training alone")
        try:
            await demo.train()
            weights = await alone
            if options.kill:
                await demo.lose_a_replica()
            await demo.conclude(weights)
        finally:
            alone.cancel()
            await asyncio.wait((alone,))
    failures = len(display.failures)
    display.say()
    verdict = f"{failures} of the promised checks FAILED" if failures else "everything promised was so"
    display.say(f"{verdict}; {time.perf_counter() - began:.0f} s in all")
    return 1 if failures else 0


class _Demo:
    def __init__(self, options: Options, display: Display, digits: Digits, cluster: Cluster, pids: Pids, names: list[str]) -> None:
        self.options = options
        self.display = display
        self.digits = digits
        self.cluster = cluster
        self.pids = pids
        self.names = names
        self.driver: Worker = cluster.driver
        self.training = Training(self.driver, names, SEED)
        self.traffic = TrafficMeter(self.driver, names)
        self.accuracy = 0.0
        self.traces: list[dict[str, Any]] = []

    # ---------------------------------------------------------------- the parts of the show

    async def introduce(self) -> None:
        """Say which processes take part."""
        say, pids, urls = self.display.say, self.pids(), self.cluster.urls
        say()
        say(f"    {'driver':8} pid {os.getpid():<8} the data, the loss, {len(self.digits.labels):,} images to learn from")
        for name, blocks in self.training.parts.items():
            size = sum(parameter.size for parameter in Network(blocks).parameters())
            say(f"    {name:8} pid {pids[name]:<8} {urls[name]}, holds {' + '.join(blocks)}, {size:,} weights")
        say(f"    {ALONE:8} pid {pids[ALONE]:<8} trains the same network in one process meanwhile, to compare with")
        say("    Messages are authenticated and encrypted with a key that was drawn a moment ago.")
        say(f"    What happens is shown at {self.cluster.dashboard_url}")
        await self.training.build()

    async def compare_gradients(self) -> None:
        """The promise of the whole thing, on one batch."""
        self.display.heading("One batch, differentiated across processes and in one")
        images, labels = self.digits.batches(0)[0]
        here = await self.training.gradients(images, labels)
        there = await self.driver.call(ALONE, "gradients_alone", SEED, asarray(images), asarray(labels))
        same = identical(here, there)
        self.display.check(
            same,
            f"the gradients of {len(here)} parameters, {sum(value.size for value in here.values()):,} numbers, "
            f"{'have the same bits' if same else 'DIFFER'}",
        )

    async def train_alone(self) -> dict[str, Tensor]:
        """The weights that training in one process arrives at."""
        data = asarray(self.digits.images), asarray(self.digits.labels)
        weights: dict[str, Tensor] = await self.driver.call(ALONE, "train_alone", SEED, self.options.epochs, *data, timeout=PATIENCE)
        return weights

    async def train(self) -> None:
        """All epochs, with a kill on the way."""
        epochs, steps = self.options.epochs, self.digits.steps
        self.display.heading(f"Training: {epochs} epochs of {steps} batches, for each batch one awaited backward pass through all processes")
        # In the middle of an epoch at two thirds of the way: there is something to lose, and something still to come.
        doomed = min(2 * epochs // 3, epochs - 1) if self.options.kill else None
        with self.display.bar(epochs * steps) as bar:
            epoch = 0
            while epoch < epochs:
                checkpoint = await self.training.begin_epoch(epoch, rate(epoch, epochs))
                try:
                    await self._epoch(epoch, bar, steps // 2 if epoch == doomed else None)
                except _Lost as lost:
                    doomed = None
                    await self._recover(lost, checkpoint)
                    continue  # the same epoch once more
                epoch += 1

    async def _epoch(self, epoch: int, bar: Bar, doomed: int | None) -> None:
        batches = self.digits.batches(epoch)
        is_last = epoch == self.options.epochs - 1
        profiled = len(batches) - PROFILED if is_last else len(batches)
        losses: list[float] = []
        for i, (images, labels) in enumerate(batches[:profiled]):
            if i == doomed:
                await self._lose(images, labels, epoch * len(batches) + i)
            losses.append(await self.training.step(images, labels))
            log("loss", losses[-1], epoch * len(batches) + i)
            self._progress(bar, epoch * len(batches) + i + 1, losses)
        if is_last:
            await self.training.start_profiles()
            with profile() as recording:
                for images, labels in batches[profiled:]:
                    losses.append(await self.training.step(images, labels))
            traces = [json.loads(text) for text in await self.training.stop_profiles()]
            self.traces = [recording.chrome_trace(process_name="driver"), *traces]
            self._progress(bar, self.options.epochs * len(batches), losses)
        self.accuracy = accuracy(await self.training.evaluate(self.digits.test_images), self.digits.test_labels)
        log("test accuracy", self.accuracy, (epoch + 1) * len(batches))
        if not self.display.is_terminal:
            number = f"{epoch + 1}/{self.options.epochs}"
            self.display.note(f"epoch {number:>6}: loss {np.mean(losses):.4f}, test {self.accuracy:6.1%}, {self.traffic.text()}")

    def _progress(self, bar: Bar, count: int, losses: list[float]) -> None:
        bar.step(count, f"loss {np.mean(losses[-10:]):.3f}, test {self.accuracy:.1%}, {self.traffic.text()}")

    async def _lose(self, images: Any, labels: Any, number: int) -> None:
        """Kill the last worker in the middle of a backward pass.

        Raises:
            _Lost: always: a step without this worker must not succeed.
        """
        name = self.names[-1]
        pid = self.pids()[name]
        self.display.note(f"{name} (pid {pid}) is killed with SIGKILL in the middle of the backward pass of batch {number}", "✂")
        ending = asyncio.create_task(self.cluster.wait_lost(name), name=f"end of {name}")
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

        try:
            await self.training.step(images, labels, midway=kill)
        except DistributedError as error:
            if not killed:
                ending.cancel()
                raise  # this is no loss that was meant to happen
            raise _Lost(name, error, killed[0], (self.training.failed_at - killed[0]) * 1e3, ending) from error
        ending.cancel()
        raise AiogradError(f"{name} was killed in the middle of a backward pass, and the step was taken all the same")

    async def _recover(self, lost: _Lost, checkpoint: Checkpoint) -> None:
        self.display.check(
            isinstance(lost.error, WorkerLostError | CommitUnknown | StepError),
            f"noticed after {lost.milliseconds:.1f} ms, where the driver awaits the {self.training.stage}: {type(lost.error).__name__}: "
            f"{textwrap.shorten(str(lost.error), 160, placeholder=' …')}",
        )
        status = await lost.ending
        await self.cluster.wait_running(lost.worker)  # the cluster has begun to restart it when its process ended
        await self.training.restore(checkpoint, lost.worker)
        seconds = time.perf_counter() - lost.at
        batch = checkpoint.epoch * self.digits.steps
        self.display.check(
            status != 0 and identical(await self.training.weights(), checkpoint.all_weights()),
            f"{lost.worker} runs again as pid {self.pids()[lost.worker]}; {seconds:.1f} s after the kill all workers have their weights and "
            f"optimizer state from before batch {batch} again, and training goes on from there",
        )

    async def lose_a_replica(self) -> None:
        """Another training, with the whole network on each worker; one is killed, and its part of each batch is computed by the others."""
        names = [*self.names, ALONE]
        count = len(self.digits.batches(0))
        self.display.heading(f"Once more, with the whole network on each of {len(names)} workers, which share each of {count} batches")
        pid = self.pids()[ALONE]
        weights, seconds, lost = await self._replicated(names, len(names), lambda: os.kill(pid, signal.SIGKILL))
        undisturbed, _, _ = await self._replicated(names[:1], len(names))
        self.display.note(f"{ALONE} (pid {pid}) is killed with SIGKILL during batch {count // 2}", "✂")
        same = identical(weights, undisturbed)
        disturbed, usual = seconds[count // 2] * 1e3, np.median(seconds) * 1e3
        self.display.check(
            same and lost == [ALONE],
            f"the others computed its part in the same step, which took {disturbed:.0f} ms instead of {usual:.0f} ms: no step failed, "
            f"none waited for a restart, and all weights {'have the same bits as' if same else 'DIFFER FROM'} those of one worker",
        )

    async def _replicated(
        self, names: list[str], shards: int, kill: Callable[[], None] | None = None
    ) -> tuple[dict[str, Tensor], list[float], list[str]]:
        """Train replicas on workers for an epoch; the weights, the seconds of each step, and the workers that were lost."""
        batches = self.digits.batches(0)
        seconds: list[float] = []
        options: dict[str, Any] = {"optimizer_options": {"lr": RATE}, "absorb": len(names) > 1}
        async with await DataParallel.create(self.driver, names, "Network", None, SEED, **options) as replicas:
            for i, (images, labels) in enumerate(batches):
                parts = zip(np.array_split(images, shards), np.array_split(labels, shards), strict=True)
                began = time.perf_counter()
                step = asyncio.create_task(replicas.step([(asarray(image), asarray(label)) for image, label in parts]), name=f"step {i}")
                await asyncio.sleep(0)
                if kill is not None and i == len(batches) // 2:
                    kill()
                await step
                seconds.append(time.perf_counter() - began)
            return await replicas.state_dict(), seconds, list(replicas.lost)

    async def conclude(self, alone: dict[str, Tensor]) -> None:
        """Show the results and check them."""
        display, options = self.display, self.options
        display.heading("What came of it")
        self.accuracy = accuracy(await self.training.evaluate(self.digits.test_images), self.digits.test_labels)
        found = f"{self.accuracy:.1%} of {len(self.digits.test_labels)} images that it has never seen are read correctly"
        if options.epochs >= EPOCHS:
            display.check(self.accuracy >= PROMISED, f"{found} (promised: at least {PROMISED:.0%})")
        else:
            display.note(f"{found} (at least {PROMISED:.0%} is promised for {EPOCHS} epochs)")
        weights = await self.training.weights()
        same = identical(weights, alone)
        disturbed = " that nothing happened to" if options.kill else ""
        display.check(
            same,
            f"all {sum(value.size for value in weights.values()):,} weights {'have the same bits as' if same else 'DIFFER FROM'} those of training "
            f"in one process{disturbed}",
        )
        path = options.output / "trace.json"
        merged = merge_traces(self.traces, path)
        seen = {(event["pid"], event["cat"]) for event in merged["traceEvents"] if event.get("cat") in ("forward", "backward")}
        display.check(
            len(seen) == 2 * (len(self.names) + 1),
            f"a trace of the last {PROFILED} batches, with forward and backward of all {len(self.names) + 1} processes: {path} (see https://ui.perfetto.dev)",
        )


class _Lost(Exception):
    """A worker was lost in the middle of a step."""

    def __init__(self, worker: str, error: DistributedError, at: float, milliseconds: float, ending: asyncio.Task[int]) -> None:
        super().__init__(worker)
        self.worker = worker
        self.error = error
        #: when it was killed, ``time.perf_counter``, and how long after that the error was raised
        self.at = at
        self.milliseconds = milliseconds
        #: waits for the process to end
        self.ending = ending


class TrafficMeter:
    """The bytes that a worker has exchanged with some of its peers, summed over reconnections."""

    def __init__(self, worker: Worker, names: list[str]) -> None:
        self._worker = worker
        self._names = names
        self._total = 0
        self._last = dict.fromkeys(names, 0)

    def text(self) -> str:
        """Bytes moved, and the mean round trip."""
        times: list[float] = []
        for peer in self._worker.statistics().peers:
            if peer.name in self._last:
                moved = peer.bytes_in + peer.bytes_out
                self._total += moved - self._last[peer.name] if moved >= self._last[peer.name] else moved
                self._last[peer.name] = moved
                if peer.round_trip is not None:
                    times.append(peer.round_trip)
        trip = f", round trip {sum(times) / len(times) * 1e3:.1f} ms" if times else ""
        return f"{megabytes(self._total)}{trip}"


def identical(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """True if both hold the same names, shapes and bits."""
    return some.keys() == others.keys() and all(np.array_equal(value.numpy(), others[name].numpy()) for name, value in some.items())
