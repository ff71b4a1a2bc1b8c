"""``python -m tests.warm_python.server LISTENER PYTHON MODULE...``: imports the modules, then forks a process for each
command that comes in on the listening socket.

It lives until its standard input ends, which is when the tests that own it do. What it forks is an ordinary process:
it leaves this program by its top, to run the command and to end as any Python does.
"""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.compiled import compile_kernels_once
from tests.warm_python import TAKEN_APART, wire


@dataclass(frozen=True)
class Child:
    """A running command, and the client who waits for it."""

    process: int
    handle: int
    connection: socket.socket


@dataclass(frozen=True)
class Start:
    """What a forked process has to run."""

    command: wire.Command
    streams: list[int]


class Server:
    """Watches its owner, its clients and their processes, in one thread: forks nothing that has more."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._children: list[Child] = []

    def serve(self) -> Start | None:
        """Forks for each client. Returns in each forked process, with what to run, and None once the owner has gone."""
        self._watch(sys.stdin, lambda: None)
        self._watch(self._listener, self._accept)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    self._end()
                    return None
                start = key.data()
                if start is not None:
                    self._forget_everything()
                    return start

    def _watch(self, source: object, react: Callable[[], Start | None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)  # type: ignore[arg-type]

    def _accept(self) -> Start | None:
        connection, _ = self._listener.accept()
        try:
            command, streams = wire.receive_command(connection)
        except ConnectionError:  # a client that was killed before it had said what to run
            connection.close()
            return None
        process = os.fork()
        if process == 0:
            connection.close()
            return Start(command, streams)
        for stream in streams:
            os.close(stream)
        child = Child(process, os.pidfd_open(process), connection)
        self._children.append(child)
        self._watch(child.handle, lambda: self._reap(child))
        self._watch(connection, lambda: self._hear(child))
        return None

    def _hear(self, child: Child) -> None:
        """A signal for the process, or the client's end, which is the process's as well."""
        if child not in self._children:  # it ended in this round, and its connection is closed
            return
        try:
            numbers = child.connection.recv(16)
        except ConnectionError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(child.process, number)
        if not numbers:
            self._selector.unregister(child.connection)

    def _reap(self, child: Child) -> None:
        _, status = os.waitpid(child.process, 0)
        self._children.remove(child)
        self._selector.unregister(child.handle)
        os.close(child.handle)
        if child.connection in self._selector.get_map():
            self._selector.unregister(child.connection)
        with child.connection:
            try:
                wire.send_status(child.connection, os.waitstatus_to_exitcode(status))
            except ConnectionError:  # a client who has gone wants to know nothing
                return

    def _end(self) -> None:
        for child in self._children:
            os.kill(child.process, signal.SIGKILL)

    def _forget_everything(self) -> None:
        """In a forked process: nothing of the server's stays open in it."""
        self._selector.close()
        self._listener.close()
        for child in self._children:
            os.close(child.handle)
            child.connection.close()


def run(start: Start, python: str) -> None:
    """Becomes ``python`` with the command's arguments, folder, environment and streams."""
    for own, given in zip(wire.STREAMS, start.streams, strict=True):
        os.dup2(given, own)
        os.close(given)
    os.chdir(start.command.folder)
    os.environ.clear()
    os.environ.update(start.command.environment)
    sys.executable = python
    if (threads := os.environ.get("OMP_NUM_THREADS")) and (torch := sys.modules.get("torch")):
        torch.set_num_threads(int(threads))
    arguments = start.command.arguments
    while arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        del arguments[0]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(arguments[1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def end(start: Start, python: str) -> NoReturn:
    """Runs the program and what it left to its end, which is not taken apart object by object: that would copy the
    memory of all that the server has loaded, for half a second. `TAKEN_APART` asks for it all the same."""
    code: object = None
    try:
        run(start, python)
    except SystemExit as leaving:
        code = leaving.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if os.environ.get(TAKEN_APART):
        sys.exit(code)  # type: ignore[arg-type]
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def name_caller(depth: int = 2) -> str:
    """What torchrun's rendezvous asks `inspect.stack` for, which looks through all modules, a dozen times a job."""
    return sys._getframe(depth).f_code.co_name


def warm_up(modules: list[str]) -> None:
    """Imports what the processes will need."""
    compile_kernels_once()
    gc.disable()  # nearly all that imports make stays
    for name in modules:
        with contextlib.suppress(ImportError):  # an optional package: who needs it will say so
            importlib.import_module(name)
    if rendezvous := sys.modules.get("torch.distributed.elastic.rendezvous.dynamic_rendezvous"):
        rendezvous.get_method_name = name_caller  # type: ignore[attr-defined]
    _await_one_thread()
    # Collections would touch, and so copy, all that the forks share.
    gc.collect()
    gc.freeze()
    gc.enable()


def _await_one_thread() -> None:
    """Threads that an import started may be about to end. Another one would be missing in every fork."""
    for _ in range(3000):
        if len(os.listdir("/proc/self/task")) == 1:
            return
        time.sleep(0.01)
    names = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
    raise RuntimeError(f"one of the modules that are loaded for all ranks runs threads, which no fork has: {names}")


def main(listener: int, python: str, modules: list[str]) -> None:
    path = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    warm_up(modules)
    sys.path[:] = path
    start = Server(socket.socket(fileno=listener)).serve()
    if start is not None:
        end(start, python)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
