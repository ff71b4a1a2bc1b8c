"""``python -SI client.py SOCKET -m module ...``: runs a command of Python in a fork of the server at SOCKET.

To whoever starts and watches it, it is that command: streams, exit code, signals, death.
"""

import os
import signal
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import wire

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
        wire.send_command(connection, wire.Command(arguments, os.getcwd(), dict(os.environ)))
        exit_code = wire.receive_status(connection)
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


main(sys.argv[1], sys.argv[2:])
