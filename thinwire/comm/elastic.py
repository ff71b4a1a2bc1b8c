"""What a job of workers that come and go is told: how many, where they meet, and how long anybody waits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.comm.checks import check_timeout
from thinwire.comm.errors import CommunicationError

__all__ = ["MEETING_PLACE", "Elastic", "MembershipError", "check_launcher", "meeting_place"]

MEETING_PLACE = "THINWIRE_MEETING"
"""The environment variable that says where workers meet."""

_LEAST_SILENCE = 2.0


class MembershipError(CommunicationError):
    """This worker cannot go on with the others, nor can it without them: the meeting place is lost, too few workers are
    left, the job is over, or nobody is left who has its weights."""


@dataclass(frozen=True)
class Elastic:
    """Workers that come and go while a job runs.

    They meet at a store that `python -m thinwire meet ADDRESS` serves, a process of its own that has to outlive them.
    How each is started is its own affair: `python`, or `torchrun --standalone`. Ranks and sizes that a launcher gives
    are not looked at: each process is a worker, unless the optimizer gets a communicator, whose ranks are one then.

    Args:
        workers: with how many the job begins.
        min_workers: with how many it goes on; where fewer are left they wait for others.
        address: "HOST:PORT" of the meeting place; by default what the environment says in THINWIRE_MEETING.
        job: tells jobs at one meeting place apart, and one run of a job from its next.
        timeout: seconds that one worker may keep the others waiting: more than the slowest takes from one outer step to
            the next, evaluation included.
        join_timeout: seconds to wait for workers: at the beginning, for one that joins, and where too few are left.
        silence: seconds without a sign of life after which a worker counts as dead.

    Raises ValueError for numbers that cannot work.
    """

    workers: int
    min_workers: int = 1
    address: str | None = None
    job: str = "job"
    timeout: float = 300.0
    join_timeout: float = 1800.0
    silence: float = 10.0

    def __post_init__(self) -> None:
        for name in ("workers", "min_workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is more than workers={self.workers}")
        check_timeout(self.timeout)
        check_timeout(self.join_timeout)
        if not _LEAST_SILENCE <= self.silence <= self.timeout:
            raise ValueError(
                f"silence must be from {_LEAST_SILENCE:g} seconds up to timeout={self.timeout:g}, got {self.silence!r}"
            )
        if not isinstance(self.job, str) or not self.job:
            raise ValueError(f"job must be a name, got {self.job!r}")


def meeting_place(settings: Elastic, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where workers meet. Raises ValueError where nobody says, or what is said is no address."""
    given = settings.address or environ.get(MEETING_PLACE)
    if given is None:
        raise ValueError(
            "nobody says where elastic workers meet: start `python -m thinwire meet HOST:PORT` and set "
            f"{MEETING_PLACE}=HOST:PORT in every worker's environment, or pass Elastic(address=...)"
        )
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"the meeting place must be HOST:PORT, as 10.0.0.1:29400, got {given!r}")
    return host, int(port)


def check_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError under a launcher that would end the workers which are to go on."""
    agents = int(environ.get("GROUP_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in environ else 1
    if agents > 1 and int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise ValueError(
            f"torchrun with {agents} agents in one rendezvous and --max-restarts restarts every worker where one has "
            "died: start one torchrun --standalone a host, each with its own --max-restarts"
        )
    if any(name in environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        raise ValueError(
            "mpirun ends the whole job where one process dies, so that nobody would be left to go on: start elastic "
            "workers one by one, with python or torchrun --standalone"
        )
