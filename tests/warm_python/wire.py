"""What a client and the server say to each other over a Unix socket.

The client sends its command, with its three standard streams, then one byte for each signal that it gets; the server
answers with the status of the process once it has ended. Whoever loses the connection has lost the other: the server
kills the process, the client kills itself.

Clients run in an interpreter that has loaded nothing, so this file imports little.
"""

import json
import socket
import struct

STREAMS = (0, 1, 2)
_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")


class Command:
    """A command line of Python, without the interpreter, and where it runs."""

    def __init__(self, arguments, folder, environment):
        self.arguments, self.folder, self.environment = arguments, folder, environment


def send_command(connection: socket.socket, command: Command) -> None:
    payload = json.dumps([command.arguments, command.folder, command.environment]).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(payload))], STREAMS)
    connection.sendall(payload)


def receive_command(connection: socket.socket) -> tuple[Command, list[int]]:
    """The command, and this process's copies of the client's streams."""
    length, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, len(STREAMS))
    if len(length) < _LENGTH.size:
        raise ConnectionError("the client has gone")
    return Command(*json.loads(_exactly(connection, *_LENGTH.unpack(length)))), streams


def send_status(connection: socket.socket, exit_code: int) -> None:
    """`exit_code`: as `os.waitstatus_to_exitcode` gives it, minus the signal for a process that was killed."""
    connection.sendall(_STATUS.pack(exit_code))


def receive_status(connection: socket.socket) -> int:
    return _STATUS.unpack(_exactly(connection, _STATUS.size))[0]


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            raise ConnectionError("the other side of the socket has gone")
        received += more
    return received
