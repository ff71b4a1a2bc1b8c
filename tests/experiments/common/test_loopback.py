"""The kernel's count of what goes through the loopback interface, and an interface that nobody else uses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.common import loopback
from tests.experiments.common.sending import SENT
from tests.launching import run

PROGRAM = [sys.executable, "-m", "tests.experiments.common.sending"]

pytestmark = pytest.mark.skipif(not loopback.bytes_sent(), reason="nobody counts the loopback interface's bytes here")


def test_a_job_on_an_interface_of_its_own_counts_its_bytes_alone() -> None:
    if subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("the system gives no network namespace")
    done = run([*PROGRAM, "--option"])
    own, before, sent, *given = done.stdout.split()
    assert (done.returncode, own, given) == (7, "True", ["--option"]), done.stderr
    assert int(before) < 10_000
    assert SENT < int(sent) < 1.1 * SENT


def test_under_a_launcher_the_interface_is_everyones() -> None:
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run(PROGRAM, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", **meeting)
    own, _, sent = done.stdout.split()
    assert (done.returncode, own) == (7, "False"), done.stderr
    assert int(sent) > SENT
