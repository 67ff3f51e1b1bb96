"""How the GPU's benchmarks measure.

Note [What a figure is]
    Work is started many times in a row and waited for once, so that what is measured is the device, unless the row says otherwise; the
    best of several rounds counts. Kernels that are bound by memory are given as a fraction of the bandwidth that copying within the device
    reached in the same run, matrix products as a fraction of what PyTorch's cuBLAS reached, networks in turns with PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark run.

    Attributes:
        device: a CudaDevice.
        torch: the module, with this device; None where it is not there.
        tiny: to see that it runs.
    """

    device: Any
    torch: Any
    tiny: bool

    def of(self, full: int, tiny: int) -> int:
        """A size or a count."""
        return tiny if self.tiny else full

    def seconds(self, call: Callable[[], Any]) -> float:
        """For one call on our device.

        Raises:
            DeviceError: its result could not be computed.
        """
        result = call()
        if hasattr(result, "flush"):
            result.flush()
            self.device.synchronize()
            result._raise_failure()  # a kernel that does not run is quick
        del result
        return best(lambda count: self._repeat(call, count), self.tiny)

    def torch_seconds(self, call: Callable[[], Any]) -> float:
        """For one call of torch's."""

        def repeat(count: int) -> None:
            for _ in range(count):
                call()
            self.torch.cuda.synchronize()

        return best(repeat, self.tiny)

    def _repeat(self, call: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            result = call()
            if hasattr(result, "flush"):
                result.flush()
            del result
        self.device.synchronize()


def best(repeat: Callable[[int], None], tiny: bool) -> float:
    """Seconds for one of the calls that `repeat` makes so many of, at its fastest."""
    repeat(1)
    repeat(2)
    if tiny:
        started = time.perf_counter()
        repeat(1)
        return time.perf_counter() - started
    count = 1
    while True:
        started = time.perf_counter()
        repeat(count)
        took = time.perf_counter() - started
        if took > 0.03:
            break
        count *= 2
    found = [took / count]
    for _ in range(ROUNDS - 1):
        started = time.perf_counter()
        repeat(count)
        found.append((time.perf_counter() - started) / count)
    return min(found)


def table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """The lines of a table in Markdown, each as soon as its row is there."""
    yield from (f"## {title}", "", "| " + " | ".join(columns) + " |", "| --- " + "| ---: " * (len(columns) - 1) + "|")
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def share(part: float, whole: float | None) -> str:
    """A fraction in percent."""
    return "" if not whole else f"{100 * part / whole:.0f} %"
