"""How an experiment starts and refuses, writes its results, and measures its memory and the loopback interface.

``python -m tests.experiments.test_common send`` sends a million bytes through the loopback interface, with anything
else it refuses its input, on real ranks.
"""

import argparse
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.common import loopback
from experiments.common.errors import BAD_INPUT, InputError, on_every_rank
from experiments.common.launching import launch
from experiments.common.peak_memory import PeakMemory, measure_alone
from experiments.common.results import read_json, write_json
from tests.launching import Jobs, run
from thinwire.comm import Communicator, Launch

THIS = "tests.experiments.test_common"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("moment", nargs="?")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args(arguments)
    if options.moment == "bad":
        raise InputError("this cannot be used")
    return options


def refuse(comm: Communicator, options: argparse.Namespace) -> None:
    def action() -> None:
        if comm.rank == comm.size - 1:
            raise InputError("this cannot be used")

    on_every_rank(comm, action)


def test_bad_arguments_are_refused_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[int] = []
    assert launch(THIS, parse, lambda comm, _: sizes.append(comm.size), [], default_ranks=1) == 0
    capsys.readouterr()
    assert launch(THIS, parse, lambda *_: sizes.append(0), ["bad"], default_ranks=64) == BAD_INPUT
    assert sizes == [1]
    assert capsys.readouterr().err == f"{THIS}: error: this cannot be used\n"


@pytest.mark.launch
def test_refusals_in_ranks_end_with_one_message(jobs: Jobs) -> None:
    """Of one rank; to each, the launcher that started it is any launcher."""
    done = jobs.alone("-m", THIS, "work", "--ranks=2")
    assert done.returncode != 0
    assert done.stderr.count("error: this cannot be used") == 1


def test_ranks_must_be_those_that_the_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.common.launching.detect", lambda _: Launch("torchrun", "", 0, 1, 0, 1))
    # This process goes on, with garbage to collect.
    monkeypatch.setattr("experiments.common.launching.gc.freeze", lambda: None)
    settings = argparse.Namespace(ranks=3)
    assert launch(THIS, lambda _: settings, lambda *_: pytest.fail("it worked"), [], 1) == BAD_INPUT


def test_json_replaces_the_old_file_whole_and_knows_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": [1.5, float("nan"), (float("inf"), {"b": float("-inf")})], 0.5: "x"})
    with pytest.raises(TypeError):
        write_json(path, {"b": object()})
    assert read_json(path) == {"a": [1.5, None, [None, {"b": None}]], "0.5": "x"}


def peaks_of(megabytes: int) -> tuple[int, int]:
    with PeakMemory() as peak:
        np.ones(megabytes * 2**20, dtype=np.uint8)
    with PeakMemory() as nothing:
        pass
    return peak.extra, nothing.extra


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_the_peak_counts_what_is_freed_again() -> None:
    # Alone: in this process, memory that earlier tests have left would hide the peak.
    peak, nothing = measure_alone(peaks_of, 64)
    assert peak == pytest.approx(64 * 2**20, rel=0.1)
    assert nothing < 8 * 2**20


SENT = 1_000_000


def send() -> int:
    before = loopback.bytes_sent()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            for _ in range(10):
                sender.sendall(bytes(SENT // 10))
                left = SENT // 10
                while left:
                    left -= len(receiver.recv(left))
    print(loopback.is_own(), before, loopback.bytes_sent() - before, *sys.argv[1:], flush=True)
    return 7


@pytest.mark.skipif(not loopback.bytes_sent(), reason="nobody counts the loopback interface's bytes here")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.programs
def test_a_job_counts_its_bytes_on_an_interface_of_its_own_but_under_a_launcher(own: bool, jobs: Jobs) -> None:
    if own and subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("the system gives no network namespace")
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    program = ["-m", THIS, "send", "--option"]
    # In a namespace of its own, no server of warm interpreters is reached.
    done = run([sys.executable, *program]) if own else jobs.alone(*program, **launched)
    found, before, sent, *given = done.stdout.split()
    assert (done.returncode, found, given) == (7, str(own), ["send", "--option"]), done.stderr
    assert int(sent) > SENT
    assert not own or (int(before) < 10_000 and int(sent) < 1.1 * SENT)


if __name__ == "__main__":
    sys.exit(
        loopback.run_on_own(THIS, send)
        if "send" in sys.argv
        else launch(THIS, parse, refuse, sys.argv[1:], default_ranks=2)
    )
