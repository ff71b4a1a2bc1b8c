from __future__ import annotations

import warnings

import pytest

from thinwire.comm import Communicator, threads
from thinwire.comm.launch import count_hosts


def test_one_host():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert threads.run(lambda comm: count_hosts(comm, thinwire="1", torch="2"), 3) == [1, 1, 1]


def test_another_thinwire_is_an_error_on_every_rank():
    def body(comm: Communicator) -> None:
        with pytest.raises(RuntimeError, match=r"rank 2 on .* runs thinwire 1\.1, rank 0 on .* 1\.0: install"):
            count_hosts(comm, thinwire="1.1" if comm.rank == 2 else "1.0", torch="2")

    threads.run(body, 3)


def test_another_torch_is_a_warning():
    with pytest.warns(RuntimeWarning, match=r"rank 1 on .* runs torch 2\.2, rank 0 on .* 2\.1") as caught:
        threads.run(lambda comm: count_hosts(comm, thinwire="1", torch=f"2.{comm.rank + 1}"), 2)
    assert len(caught) == 1
