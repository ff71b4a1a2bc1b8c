"""A probe on a network whose every message takes a known time, by a clock that only messages move; the file between
probe and plan; and scripts that `--measure` runs as they are."""

import json
import math
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.comm.traffic import sent_bytes
from thinwire.plan import (
    Calibration,
    Link,
    Matrices,
    PlanError,
    Processor,
    Speed,
    load_calibration,
    probe,
    probing,
    save_calibration,
)
from thinwire.plan.calibration import CollectiveFit, DiskRates, LinkFit, in_words
from thinwire.plan.cluster import COLLECTIVES, Collective
from thinwire.plan.measure import StepTimer, measure_script, workload_of
from thinwire.plan.probing import Stopwatch, disk_rates, fit_line, fit_link
from thinwire.zero import disk as zero_disk
from thinwire.zero.disk import IN_MEMORY, file_system

LINK = Link(
    Speed(2e-4, 1e8),
    3e-5,
    {"all_to_all": Speed(1e-4, 1.2e8), "all_gather": Speed(3e-4, 0.9e8), "all_reduce": Speed(2e-4, 1e8)},
)


class SlowNetwork:
    """A communicator's collectives, which move this rank's clock by what `link` says they take."""

    def __init__(self, comm: Communicator, link: Link, disturb: Callable[[int], float]) -> None:
        self.now = 0.0
        self.calls = 0
        for name in COLLECTIVES:
            setattr(comm, name, self._slow(comm, name, getattr(comm, name), link, disturb))

    def clock(self) -> float:
        return self.now

    def _slow(self, comm: Communicator, name: Any, start: Any, link: Link, disturb: Callable[[int], float]) -> Any:
        def slow(*tensors: Tensor, **options: bool) -> Any:
            nbytes = sent_bytes(name, tensors[-1].nbytes, comm.size)
            if tensors[-1].dtype == torch.uint8:  # many at once, of which no one waits for another
                self.now += (comm.size - 1) * link.message
            else:
                self.calls += 1
                self.now += link.seconds(name, comm.size, nbytes) * disturb(self.calls)
            return start(*tensors, **options)

        return slow


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_link_is_found(ranks: int) -> None:
    def rank(comm: Communicator) -> Any:
        network = SlowNetwork(comm, LINK, lambda call: 50.0 if call % 5 == 0 and comm.rank == 1 else 1.0)
        return fit_link(Stopwatch(comm, torch.device("cpu"), network.clock), seconds=3.0)

    fits = threads.run(rank, ranks)
    assert all(fit == fits[0] for fit in fits)
    assert fits[0].message == pytest.approx(LINK.message)
    for name in COLLECTIVES:
        found = fits[0].collectives[name]
        assert found.bytes_per_second == pytest.approx(LINK.measured[name].bytes_per_second, rel=1e-6)
        assert found.intercept == pytest.approx(LINK.seconds(name, ranks, 0), rel=1e-6)
        assert found.error < 1e-6
        assert len(found.seconds) > 4


def test_a_thin_wire_is_measured_with_less() -> None:
    """At 1 MB/s a minute is not enough for 64 MiB."""

    def rank(comm: Communicator) -> float:
        network = SlowNetwork(comm, Link.of(1e6, 1e-3, 1e-4), lambda call: 1.0)
        fit = fit_link(Stopwatch(comm, torch.device("cpu"), network.clock), seconds=60.0)
        assert fit.collectives["all_reduce"].bytes_per_second == pytest.approx(1e6)
        return network.now

    assert 10 < threads.run(rank, 4)[0] < 70


class Hosts:
    """Gives each thread the host name of its rank, in the place of the machine's."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._local = threading.local()

    def settle(self, comm: Communicator) -> None:
        self._local.name = self._names[comm.rank]

    def __call__(self) -> str:
        return self._local.name


def probed(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[Calibration]:
    hosts = Hosts(names)
    monkeypatch.setattr(socket, "gethostname", hosts)
    monkeypatch.setattr(probing, "_ELEMENTS", 1 << 16)

    def rank(comm: Communicator) -> Calibration:
        hosts.settle(comm)
        return probe(comm, seconds=0.01)

    return threads.run(rank, len(names))


@pytest.mark.parametrize(
    ("names", "nodes", "between", "inside"),
    [
        (["a"], 1, None, None),
        (["a", "a", "a"], 1, None, 3),
        (["a", "b", "c"], 3, 3, None),
        (["a", "b", "a", "b"], 2, 2, 2),
    ],
)
def test_what_is_there_is_measured(monkeypatch, names: list[str], nodes: int, between, inside) -> None:
    found = probed(monkeypatch, names)
    assert all(one == found[0] for one in found)
    assert (found[0].nodes, found[0].ranks_per_node) == (nodes, len(names) // nodes)
    assert (found[0].between and found[0].between.ranks) == between
    assert (found[0].inside and found[0].inside.ranks) == inside
    assert found[0].backend == "threads"
    if len(names) == 1:
        assert found[0].processor.overlap == 1.0


def test_uneven_nodes_are_refused_on_every_rank(monkeypatch) -> None:
    hosts = Hosts(["a", "b", "b"])
    monkeypatch.setattr(socket, "gethostname", hosts)

    def rank(comm: Communicator) -> str:
        hosts.settle(comm)
        with pytest.raises(PlanError) as refusal:
            probe(comm)
        return str(refusal.value)

    told = threads.run(rank, 3)
    assert told == ["a probe needs equally many ranks on every node, got a 1, b 2: start it on an even set"] * 3


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    refused(PlanError, "the seconds of a probe must be a number above 0", probe, threads.single(10.0), seconds)


# Lines through measurements, some of which were disturbed

AMOUNTS = [4.0**power for power in range(3, 11)]


@given(st.floats(0, 1), st.floats(1e-9, 1))
def test_an_exact_line_is_found(intercept: float, slope: float) -> None:
    found = fit_line(AMOUNTS, [intercept + slope * amount for amount in AMOUNTS])
    assert found[0] == pytest.approx(intercept, rel=1e-3, abs=1e-3 * slope * AMOUNTS[0])
    assert found[1] == pytest.approx(slope, rel=1e-3, abs=1e-9 * intercept)
    assert found[2] < 1e-6


@given(
    st.floats(1e-4, 1e-2),
    st.floats(1e-8, 1e-5),
    st.lists(st.integers(0, 5), min_size=0, max_size=2, unique=True),
    st.floats(3, 100),
)
def test_two_of_eight_may_be_far_too_slow_without_moving_large_transfers(intercept, slope, disturbed, factor) -> None:
    seconds = [intercept + slope * amount for amount in AMOUNTS]
    for index in disturbed:
        seconds[index] *= factor
    found = fit_line(AMOUNTS, seconds)
    for amount in AMOUNTS[6:]:
        assert found[0] + found[1] * amount == pytest.approx(intercept + slope * amount, rel=0.05)


def test_a_shaper_s_burst_does_not_hide_its_rate() -> None:
    """Half of the sizes pass at once."""
    seconds = [1e-4 + amount * (1e-10 if amount < 20_000 else 1e-7) for amount in AMOUNTS]
    intercept, slope, _ = fit_line(AMOUNTS, seconds)
    assert intercept >= 0
    assert slope == pytest.approx(1e-7, rel=0.1)


@pytest.mark.parametrize(
    ("amounts", "seconds"), [([], []), ([1.0], [1.0]), ([2.0, 2.0], [1.0, 1.0]), ([0.0, 1.0], [1.0, 2.0])]
)
def test_too_little(amounts, seconds) -> None:
    refused(ValueError, "two different amounts", fit_line, amounts, seconds)


RATES = Processor(memory=2e10, encode=1e9, decode=2e9, average=3e9, adam=1e8, overlap=0.5)


def test_a_disk_is_read_written_and_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if file_system(tmp_path) in IN_MEMORY:
        pytest.skip("temporary files are in memory here")
    monkeypatch.setattr(probing, "_FILE_BYTES", 32 << 20)
    done: list[bool] = []

    def transfer(call: Callable[..., int], path: Path, flags: int, view: memoryview, offset: int) -> None:
        done.append(call is os.pwritev)
        zero_disk.transfer(call, path, flags, view, offset)

    def typical(run: Callable[[], object], repetitions: int) -> float:
        done.clear()
        run()
        return {8: 1.0, 0: 2.0, 4: 4.0}[done.count(True)]

    monkeypatch.setattr(probing, "transfer", transfer)
    watch = Stopwatch(threads.single(10.0), torch.device("cpu"))
    monkeypatch.setattr(watch, "typical", typical)
    found = disk_rates(watch, tmp_path, ranks_per_node=3)
    assert len(done) == 8
    assert found == DiskRates(write=3.0 * (32 << 20), read=1.5 * (32 << 20), both=0.75 * (32 << 20))
    assert not [*tmp_path.iterdir()]
    assert "reads 0.05, writes 0.10, both by turns 0.03 GB/s" in in_words(calibration(disk=found), tmp_path)


@pytest.mark.parametrize(
    ("folder", "told"),
    [("/dev/shm", "/dev/shm is tmpfs: memory, not a disk"), ("/nowhere", "of /nowhere cannot be measured.*No such")],
)
@on_threads(2)
def test_what_is_no_disk_is_refused_on_every_rank(comm: Communicator, folder: str, told: str) -> None:
    refused(ValueError, told, probe, comm, 1.0, "cpu", folder if comm.rank == 1 else os.curdir)


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


speeds = st.builds(Speed, st.floats(0, 1e-2), st.floats(1e3, 1e12))


@given(speeds, st.floats(0, 1e-3), st.fixed_dictionaries(dict.fromkeys(COLLECTIVES, speeds)), st.integers(2, 64))
def test_a_link_comes_back_as_it_was(speed, message, measured, ranks) -> None:
    link = Link(speed, message, measured)
    found = calibration(between=link_fit(link, ranks)).link("between")
    for name in COLLECTIVES:
        for others in (2, ranks, 1000):
            expected = link.seconds(name, others, 12345)
            assert found.seconds(name, others, 12345) == pytest.approx(expected, rel=1e-6)


def test_round_trip_and_links_that_are_not_there(tmp_path: Path) -> None:
    save_calibration(calibration(), tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json") == calibration()
    assert [one.name for one in tmp_path.iterdir()] == ["calibration.json"]
    assert calibration(between=None).link("between") is None
    assert calibration().link("inside") is None


BAD_RATE = r"(processor: .* encode rate must be|processor\.encode|Invalid JSON)"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": "four"}, "nodes"),
        ({"colour": "red"}, "colour"),
        ({"processor": None}, "processor"),
        *(({"processor": {**asdict(RATES), "encode": rate}}, BAD_RATE) for rate in (0, -1, math.nan, math.inf)),
        ({"between": {"ranks": 4, "message": 0, "collectives": {}}}, "all_to_all, all_gather, all_reduce missing"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(calibration(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(PlanError, f"{path} is no calibration of thinwire probe: .*{told}", load_calibration, path)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    refused(PlanError, "cannot be read: No such file", load_calibration, tmp_path / "none.json")
    refused(PlanError, "cannot be read: Is a directory", load_calibration, tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    refused(PlanError, "is no calibration", load_calibration, tmp_path / "bytes")


# As for torchrun: a process group, DDP, two micro-batches a step, a sleep in forward, and work left to do afterwards.
SCRIPT = """
import time
import helper
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(helper.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print("training")
for step in range(1_000_000):
    for part in range(2):
        time.sleep(0.05)
        model(torch.randint(0, 50, (4, 8))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HELPER = """
from torch import nn
def model():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.LayerNorm(32))
"""


def test_a_script_for_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str], warm: None) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    workload = measure_script(script, 3, 120.0)
    model = workload.model
    assert (model.name, workload.accumulation, workload.dtype) == ("train.py", 2, "fp32")
    assert 0.05 <= workload.forward_seconds < 5
    assert workload.backward_seconds > 0
    assert workload.update_seconds
    assert capfd.readouterr() == ("", "training\n")
    assert (model.parameters, model.matrices) == (50 * 16 + 32 * 16 + 3 * 32, (Matrices(50, 16), Matrices(32, 16)))
    assert model.last == Matrices(50, 16)


def test_a_script_that_fails(tmp_path: Path, warm: None) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('no data here')")
    with pytest.raises(PlanError, match=r"ended with exit code 1 before it could be measured:[\s\S]*no data here"):
        measure_script(script, 3, 120.0)


def test_a_script_that_takes_too_long_or_is_not_there(tmp_path: Path, warm: None) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(600)")
    refused(PlanError, r"did not make 6 steps in 1 s: give --measure-limit", measure_script, script, 3, 1.0)
    with pytest.raises(PlanError, match=r"--measure /nowhere/train\.py: there is no such file"):
        measure_script(Path("/nowhere/train.py"), 3, 1.0)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(1, 0), (2, 0), (3, 0)], "its steps have 2 to 3 backwards: give --forward, --backward"),
        ([(1, 0), (1, 1)], "it steps several optimizers, SGD and SGD"),
        ([(0, 0)], "it steps without a backward before, as with a closure"),
    ],
)
def test_steps_that_are_no_measure(monkeypatch, steps: list[tuple[int, int]], told: str) -> None:
    """Of each step: how many backwards it has, and the optimizer that makes it."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    found: list[dict[str, Any]] = []
    handles = StepTimer(1, 2, found.append).install()
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    try:
        for backwards, which in steps:
            for _ in range(backwards):
                model(torch.ones(3)).sum().backward()
            optimizers[which].step()
    finally:
        for handle in handles:
            handle.remove()
    assert told in found[0]["problem"]


def test_16_bit_parameters() -> None:
    found = {"forward": 0.1, "backward": 0.2, "update": 0.3, "accumulation": 1, "dtype": "bf16"}
    workload = workload_of("x.py", found | {"shapes": [[4], [3, 4, 5]]})
    assert (workload.element_bytes, workload.update_seconds) == (2, 0.3)
    assert (workload.model.matrices, workload.model.last) == ((Matrices(3, 20),), None)
