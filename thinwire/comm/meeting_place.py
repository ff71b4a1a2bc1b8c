"""The store through which elastic workers find each other: who serves it, and how a worker gets there."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from thinwire.comm.elastic import Elastic, MembershipError, check_launcher, meeting_place

__all__ = ["reach", "serve"]

_SECONDS = 300.0


def serve(address: str) -> TCPStore:
    """Serve a meeting place, as long as what is returned lives.

    Raises ValueError where `address` is none, and OSError where this host cannot listen there.
    """
    host, port = meeting_place(Elastic(workers=1, address=address))
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen(socket.SOMAXCONN)
    return TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # torch itself would listen on every interface
    )


def reach(settings: Elastic) -> tuple[Store, str]:
    """Go to the meeting place: its store, and its address.

    Raises ValueError where nobody says where that is, or where the launcher would end the workers that are to go on,
    and MembershipError where nobody serves it within `join_timeout`.
    """
    check_launcher()
    host, port = meeting_place(settings)
    try:
        store = TCPStore(host, port, None, False, timedelta(seconds=settings.join_timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise MembershipError(
            f"nobody serves a meeting place at {host}:{port}: start `python -m thinwire meet {host}:{port}` there "
            f"({error})"
        ) from error
    return store, f"{host}:{port}"
