"""The script in place of ssh: which namespace an address means, and what an unreachable host looks like."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.ethernet.cluster import remote_agent


@pytest.mark.parametrize(("address", "number"), [("10.77.0.1", 0), ("10.77.0.250", 249)])
def test_addresses_count_from_one(address: str, number: int) -> None:
    assert remote_agent.host_number(address) == number


def test_a_command_runs_in_its_hosts_namespace_under_its_name() -> None:
    command = remote_agent.remote_command("cluster", "10.77.0.3", ["prted", "--tree", "a b"])
    assert command[:4] == ["ip", "netns", "exec", "cluster-host2"]
    assert command[-1].endswith("; prted --tree a b")
    assert "echo host2 >" in command[-1]


def test_a_host_that_does_not_answer_is_named_with_sshs_exit_code() -> None:
    # TCP connects to no broadcast address: that fails at once, on any machine.
    command = [sys.executable, str(remote_agent.__file__), "cluster", "255.255.255.255", "true"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 255
    assert "connect to host 255.255.255.255" in finished.stderr
