"""What every test shares: one thread a process, so that ranks on threads do not crowd two cores, and a Python that
starts warm, for real ranks."""

import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiled import compile_kernels_once
from tests.launching import Jobs, one_core
from tests.warm_python import WarmPython
from thinwire.comm import Communicator, threads

if importlib.util.find_spec("hypothesis") is not None:  # a GPU's machine may have none
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
    settings.load_profile("untimed")

_OWNER = pytest.StashKey[WarmPython]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs a GPU, which make gpu names."""
    asked = any("gpu" in Path(one).parts for one in config.args)
    return True if collection_path == Path(__file__).with_name("gpu") and not asked else None


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    compile_kernels_once()
    run = threads.run

    def run_on_one_core(*arguments: Any, **options: Any) -> Any:
        with one_core():
            return run(*arguments, **options)

    threads.run = run_on_one_core


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the timeout of an `init` in this process, nor the threads that Lightning's launcher gives it."""
    monkeypatch.setattr(Communicator, "usual_timeout", 300.0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Leaves what modules and imports have made out of collections, and out of the searches of all objects by which
    optimizers find trainers: transformers alone makes a million, and tests make thousands of optimizers."""
    gc.collect()
    gc.freeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_stays() -> Iterator[None]:
    """Fails the module that leaves torch's process group to the tests after it, which would fail or train with it.

    DTensor's cache, one a thread, holds groups that are no more: a fork from another thread would end them, and hang.
    """
    yield
    torch._C._clear_DTensor_sharding_propagator_cache()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("a test of this module left torch.distributed initialised")


@pytest.fixture
def own_process_group() -> Iterator[None]:
    """For a test that has torch.distributed initialised in this process: ends that."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest) -> Jobs:
    """Starts real processes; their interpreter is warm, see `WarmPython` for what that hides."""
    shared = getattr(request.config, "workerinput", {}).get("warm_python")
    return Jobs(shared or request.config.stash[_OWNER].path)


@pytest.fixture
def warm(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what starts a process of its own: lets that be a warm one."""
    monkeypatch.setattr(sys, "executable", jobs.python)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OWNER] = WarmPython()
    sys.executable = getattr(config, "workerinput", {}).get("cold_python", sys.executable)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """pytest-xdist's workers are themselves forks of the server: each would import the same modules for 20 s."""
    for spec in specs:
        spec.python = config.stash[_OWNER].path


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All of pytest-xdist's workers share the server of the process that started them. What they start by themselves
    is cold."""
    node.workerinput["warm_python"] = node.config.stash[_OWNER].path
    node.workerinput["cold_python"] = sys.executable


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_OWNER].close()


def pytest_collection() -> None:
    """Imports make a million objects that stay: searching them for garbage takes a quarter of the collection."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start jobs come first: they take longest, and whoever starts the last one keeps all others waiting."""
    starting = {item.path for item in items if item.get_closest_marker("launch")}
    items.sort(key=lambda item: item.path not in starting)
