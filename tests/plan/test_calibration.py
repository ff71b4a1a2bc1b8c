"""The file between probe and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan import Calibration, Link, PlanError, Processor, Speed, load_calibration, save_calibration
from thinwire.plan.calibration import CollectiveFit, LinkFit
from thinwire.plan.cluster import COLLECTIVES, Collective

RATES = Processor(memory=2e10, encode=1e9, decode=2e9, average=3e9, adam=1e8, overlap=0.5)


def link_fit(link: Link, ranks: int) -> LinkFit:
    """What a probe finds on a link that obeys the model."""
    collectives: dict[Collective, CollectiveFit] = {}
    for name in COLLECTIVES:
        rate = link.measured.get(name, link.speed).bytes_per_second
        collectives[name] = CollectiveFit(
            intercept=link.seconds(name, ranks, 0),
            bytes_per_second=rate,
            error=0.0,
            input_bytes=[4, 8],
            seconds=[1.0, 2.0],
        )
    return LinkFit(ranks=ranks, message=link.message, collectives=collectives)


def calibration(**changes: Any) -> Calibration:
    between = link_fit(Link.of(1e8, 1e-4, 1e-5), 4)
    fields: dict[str, Any] = {
        "backend": "gloo",
        "nodes": 4,
        "ranks_per_node": 1,
        "between": between,
        "inside": None,
        "processor": RATES,
    }
    return Calibration(**fields | changes)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    assert load_calibration(path) == calibration()
    assert [one.name for one in tmp_path.iterdir()] == ["calibration.json"]


speeds = st.builds(Speed, st.floats(0, 1e-2), st.floats(1e3, 1e12))


@settings(deadline=None)
@given(speeds, st.floats(0, 1e-3), st.fixed_dictionaries(dict.fromkeys(COLLECTIVES, speeds)), st.integers(2, 64))
def test_a_link_comes_back_as_it_was(speed, message, measured, ranks) -> None:
    link = Link(speed, message, measured)
    found = calibration(between=link_fit(link, ranks)).link("between")
    assert found is not None
    for name in COLLECTIVES:
        for others in (2, ranks, 1000):
            expected = link.seconds(name, others, 12345)
            assert found.seconds(name, others, 12345) == pytest.approx(expected, rel=1e-6)


def test_links_that_are_not_there() -> None:
    assert calibration(between=None).link("between") is None
    assert calibration().link("inside") is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": "four"}, "nodes"),
        ({"colour": "red"}, "colour"),
        ({"processor": None}, "processor"),
        ({"between": {"ranks": 4, "message": 0, "collectives": {}}}, "all_to_all, all_gather, all_reduce missing"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match=f"{path} is no calibration of thinwire probe: .*{told}"):
        load_calibration(path)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_rates_are_above_zero(tmp_path: Path, rate: float) -> None:
    path = tmp_path / "calibration.json"
    tree = calibration().model_dump()
    tree["processor"]["encode"] = rate
    path.write_text(json.dumps(tree))
    with pytest.raises(PlanError, match=r"processor: .* encode rate must be|processor\.encode|Invalid JSON"):
        load_calibration(path)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        load_calibration(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        load_calibration(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    with pytest.raises(PlanError, match="is no calibration"):
        load_calibration(tmp_path / "bytes")
