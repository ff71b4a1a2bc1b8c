"""How an optimizer of an elastic job begins: what it cannot do, and what all of its workers must have alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.comm.elastic import Elastic
from thinwire.comm.meeting_place import enter
from thinwire.comm.membership import Membership

__all__ = ["enter_elastic_job", "own_communicator"]


def own_communicator(
    elastic: object, comm: Communicator | None, backend: str | None, nodes: object, stage: object
) -> Communicator:
    """A communicator of this worker alone, on which an elastic optimizer is built.

    Raises ValueError or TypeError for what elastic workers cannot have.
    """
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic must be a thinwire.Elastic, got {elastic!r}")
    if comm is not None:
        raise ValueError("elastic workers meet by themselves, over Gloo: give elastic or comm, not both")
    if backend not in (None, "gloo"):
        raise ValueError(
            f"elastic workers exchange over Gloo, got comm_backend_name={backend!r}: a worker that dies ends an MPI "
            "job, and NCCL's watchdog ends the processes of its peers"
        )
    if not isinstance(nodes, str):
        raise ValueError(f"every elastic worker is one process, got nodes={nodes!r}: leave nodes as it is")
    if stage != 0:
        raise ValueError(f"every elastic worker is one process, which has nobody to shard with, got stage={stage!r}")
    return threads.single(elastic.timeout)


def enter_elastic_job(
    elastic: Elastic, settings: Mapping[str, Any], names: Sequence[str], parameters: Sequence[Tensor]
) -> Membership:
    """Go to the meeting place; raises ValueError unless this worker's model and settings are the job's."""
    membership = enter(elastic)
    model = [
        (name, list(one.shape), str(one.dtype), one.requires_grad) for name, one in zip(names, parameters, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(model).encode()).hexdigest()[:16]
    try:
        membership.agree_on({**settings, "parameters": len(model), "model": digest})
    except ValueError:
        membership.leave()
        raise
    return membership
