"""What every test shares: one thread a process, so that ranks on threads do not crowd two cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start jobs come first: they take longest, and whoever starts the last one keeps all others waiting."""
    starting = {item.path for item in items if item.get_closest_marker("launch")}
    items.sort(key=lambda item: item.path not in starting)
