"""A device whose arrays are numpy's and whose work waits in a queue: it fails on demand, and tests the protocol of devices without hardware."""

from tests.toy_device.array import ToyArray
from tests.toy_device.device import ToyDevice, ToyError, ToyMemoryError, ToyStatistics

__all__ = ["ToyArray", "ToyDevice", "ToyError", "ToyMemoryError", "ToyStatistics"]
