"""How an experiment starts and refuses, writes its results, and measures its memory."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.common.errors import BAD_INPUT, InputError, on_every_rank
from experiments.common.launching import launch
from experiments.common.peak_memory import PeakMemory, measure_alone
from experiments.common.results import check_writable, read_json, write_json
from tests.launching import Jobs
from thinwire.comm import Communicator, Launch, threads

THIS = "tests.experiments.common.refusing"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    if "bad" in arguments:
        raise InputError("bad was given: give good")
    return argparse.Namespace(ranks=None)


def test_one_rank_works_in_this_process() -> None:
    sizes: list[int] = []
    assert launch(THIS, parse, lambda comm, _: sizes.append(comm.size), [], default_ranks=1) == 0
    assert sizes == [1]


def test_bad_arguments_are_refused_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(THIS, parse, lambda *_: pytest.fail("it worked"), ["bad"], default_ranks=64) == BAD_INPUT
    assert capsys.readouterr().err == f"{THIS}: error: bad was given: give good\n"


def test_every_rank_gets_the_complaint_of_one() -> None:
    def work(comm: Communicator) -> str:
        def action() -> None:
            if comm.rank == 2:
                raise InputError("disk 7 is full")

        with pytest.raises(InputError) as caught:
            on_every_rank(comm, action)
        return str(caught.value)

    assert threads.run(work, 4) == ["disk 7 is full (first seen on rank 2)"] * 4


def test_results_stay_with_their_ranks() -> None:
    assert threads.run(lambda comm: on_every_rank(comm, lambda: comm.rank), 3) == [0, 1, 2]


def test_other_errors_are_not_the_users() -> None:
    def action() -> None:
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        threads.run(lambda comm: on_every_rank(comm, action), 1)


@pytest.mark.launch
def test_refusals_in_ranks_end_with_one_message(jobs: Jobs) -> None:
    assert_refused_once(jobs.alone("-m", THIS, "work-on-last", "--ranks", "2"))


@pytest.mark.launch
def test_another_launchers_ranks_refuse_alike(jobs: Jobs) -> None:
    assert_refused_once(jobs.torchrun(2, "-m", THIS, "parse"))


def test_ranks_must_be_those_that_the_launcher_started() -> None:
    settings = argparse.Namespace(ranks=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.common.launching.detect", lambda _: Launch("torchrun", "", 0, 1, 0, 1))
        # This process goes on, with garbage to collect.
        patch.setattr("experiments.common.launching.gc.freeze", lambda: None)
        assert launch(THIS, lambda _: settings, lambda *_: pytest.fail("it worked"), [], 1) == BAD_INPUT


def assert_refused_once(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode != 0
    assert ended.stderr.count("error: this cannot be used") == 1


def test_json_replaces_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert path.read_text() == '{\n "a": 1\n}\n'


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": [1.5, float("nan"), (float("inf"), {"b": float("-inf")})], 0.5: "x"})
    assert read_json(path) == {"a": [1.5, None, [None, {"b": None}]], "0.5": "x"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"--output .*file cannot be written"):
        check_writable(tmp_path / "file", "--output")
    check_writable(tmp_path / "new" / "folder", "--output")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


def peaks_of(megabytes: int) -> tuple[int, int]:
    with PeakMemory() as peak:
        np.ones(megabytes * 2**20, dtype=np.uint8)
    with PeakMemory() as nothing:
        pass
    return peak.extra, nothing.extra


@linux
def test_the_peak_counts_what_is_freed_again() -> None:
    megabytes = 64
    # Alone: in this process, memory that earlier tests have left would hide the peak.
    peak, nothing = measure_alone(peaks_of, megabytes)
    assert peak == pytest.approx(megabytes * 2**20, rel=0.1)
    assert nothing < megabytes * 2**20 / 8
