"""Commands that fail say so, and what a machine lacks is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.ethernet.cluster.commands import ClusterError, missing, run


def test_output_is_returned() -> None:
    assert run("printf", "%s", "a b") == "a b"


def test_a_failure_passes_the_complaint_on() -> None:
    with pytest.raises(ClusterError, match=r"sh -c echo no >&2; exit 3: no"):
        run("sh", "-c", "echo no >&2; exit 3")


def test_users_other_than_root_are_told() -> None:
    assert "root" in str(missing(user=1000))


def test_absent_tools_are_named(tmp_path: Path) -> None:
    assert "ip, tc, unshare" in str(missing({"PATH": str(tmp_path)}, user=0))
