"""A stretch of code whose random numbers depend on a seed alone, and leave no trace in the generators that the model's
dropout draws from: what a dataset or collator draws is then the same with any number of workers, and after a resume."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch.utils.data import get_worker_info

__all__ = ["seeded"]

# The generators belong to the process: ranks that are threads would put back each other's states.
_generators_in_use = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generators with `seed`, and give them their states back at the end."""
    # A worker is one thread, forked perhaps while another thread of its parent held the lock.
    alone = _generators_in_use if get_worker_info() is None else nullcontext()
    with alone, torch.random.fork_rng(devices=[]):
        python_state, numpy_state = random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
