"""A program that sends a million bytes through the loopback interface; `test_loopback` starts it on one of its own."""

from __future__ import annotations

import socket
import sys

from experiments.common import loopback

SENT = 1_000_000


def main() -> int:
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


if __name__ == "__main__":
    sys.exit(loopback.run_on_own("tests.experiments.common.sending", main))
