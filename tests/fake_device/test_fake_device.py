"""What a GPU would run into, on a device that needs none: see `tests.fake_device`."""

import json
from pathlib import Path

import pytest

from tests.fake_device import build, compiler
from tests.fake_device.cases import CASES
from tests.launching import Jobs

pytestmark = [pytest.mark.launch, pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")]

# Of each kind one: what `make test` runs.
SMOKE = {
    *("OneBitAdam-0-1-ranks", "OneBitAdam-0-waits", "OneBitLamb-1-waits"),
    *("rounded-1", "edits", "launches", "captured-counts"),
}


def _case_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params["name"] if callspec is not None and item.path == Path(__file__) else None


@pytest.fixture(scope="module")
def became_of(jobs: Jobs, request: pytest.FixtureRequest) -> dict[str, str | None]:
    """By case, its error or None, from one process for all that are selected."""
    build()
    selected = [name for item in request.session.items if (name := _case_of(item)) is not None]
    done = jobs.alone("-m", "tests.fake_device.cases", *selected)
    results = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    for name in selected:
        results.setdefault(name, f"did not end: {done.stderr[-2000:]}")
    return results


def test_several_processes_stage_their_tensors_over_gloo(jobs: Jobs) -> None:
    build()
    done = jobs.torchrun(2, "-m", "tests.fake_device.cases", "rank", "OneBitAdam-0", "fake", "gloo")
    assert "2 ranks agree" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMOKE else [pytest.mark.kernels]) for name in CASES]
)
def test_case(name: str, became_of: dict[str, str | None]) -> None:
    assert became_of[name] is None, became_of[name]
