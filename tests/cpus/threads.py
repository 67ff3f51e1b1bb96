"""A pytest plugin: so many BLAS threads, also more than there are cores."""

from __future__ import annotations

import os

import numpy as np
from threadpoolctl import threadpool_limits

from tests.cpus.paths import THREADS_VARIABLE

np.dot(np.ones(2), np.ones(2))  # its BLAS is loaded
if THREADS_VARIABLE in os.environ:
    threadpool_limits(int(os.environ[THREADS_VARIABLE]), user_api="blas")
