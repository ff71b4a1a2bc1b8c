"""What every test shares: one thread a process, so that ranks on threads do not crowd two cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
