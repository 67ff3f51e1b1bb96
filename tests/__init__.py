"""The test suite. A package, so that tests share code as ``tests.name``."""
