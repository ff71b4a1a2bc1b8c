"""What the ranks of a job tell each other when they meet: where they are, and what they run."""

from __future__ import annotations

import json
import socket
import warnings

from thinwire.comm.communicator import Communicator

__all__ = ["count_hosts"]


def count_hosts(comm: Communicator, *, thinwire: str, torch: str) -> int:
    """On how many hosts the ranks are. Collective.

    `thinwire`, `torch`: this rank's versions. Where those of torch differ rank 0 warns. Raises RuntimeError, on every
    rank, where those of thinwire do: what they send each other may differ too.
    """
    mine = {"host": socket.gethostname(), "thinwire": thinwire, "torch": torch}
    everyones = [json.loads(one) for one in comm.all_gather_bytes(json.dumps(mine).encode(), "join the job")]
    first = everyones[0]
    for rank, other in enumerate(everyones):
        if other["thinwire"] != first["thinwire"]:
            raise RuntimeError(
                f"rank {rank} on {other['host']} runs thinwire {other['thinwire']}, rank 0 on {first['host']} "
                f"{first['thinwire']}: install the same version on every host"
            )
    of_another = next((rank for rank, other in enumerate(everyones) if other["torch"] != first["torch"]), None)
    if of_another is not None and comm.rank == 0:
        other = everyones[of_another]
        warnings.warn(
            f"rank {of_another} on {other['host']} runs torch {other['torch']}, rank 0 on {first['host']} "
            f"{first['torch']}: they may round differently, so that replicas of the weights drift apart",
            RuntimeWarning,
            stacklevel=3,
        )
    return len({one["host"] for one in everyones})
