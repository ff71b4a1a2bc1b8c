"""A Python that starts warm: `WarmPython` forks every program from one process that has loaded torch.

Tests start hundreds of ranks, and each would spend 2 to 5 s of processor time on importing the same modules. The server
starts when the tests first ask for its Python, and ends with them.
"""

import os
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("client.py")

LOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "numba",
    "pytest",
    "hypothesis",
    "thinwire.deepspeed.initialization",
    "thinwire.optim.registry",
    "tests.warm_python.kernels",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "thinwire.hugging_face.mixin",
    "lightning.pytorch",
)
"""What most ranks load; who has more to load does so itself."""
TAKEN_APART = "TAKEN_APART"
"""Environment variable: set, a program ends as a fresh interpreter does, down to the last object and destructor."""


class WarmPython:
    """An interpreter whose programs begin with torch, its compiler's front and our kernels already loaded.

    `path` takes ``-u``, ``-c code``, ``-m module`` and a script, as launchers give them, and can be used wherever
    `sys.executable` can. What a fresh interpreter alone shows is for `sys.executable`: imports, variables that modules
    read while they are imported, network namespaces, and sets of strings, which all forks order alike.
    """

    def __init__(self, modules: Sequence[str] = LOADED) -> None:
        self._modules = modules
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @cached_property
    def path(self) -> str:
        """The interpreter. Starts the server, for which the first programs wait about 5 s."""
        if not hasattr(os, "pidfd_open"):  # not Linux: a cold one does the same, later
            return sys.executable
        self._folder = tempfile.TemporaryDirectory(prefix="warm-python-")
        python, address = (Path(self._folder.name, name) for name in ("python", "socket"))
        python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-SI", str(CLIENT), str(address)])} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        # What torch and numba read while they are imported.
        variables = {"OMP_NUM_THREADS": "1", "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_python.server", str(listener.fileno()), str(python), *self._modules],
                stdin=subprocess.PIPE,
                cwd=REPOSITORY,
                env=os.environ | variables,
                pass_fds=[listener.fileno()],
            )
        return str(python)

    def close(self) -> None:
        """End the server and whatever it still runs."""
        if self._server is not None and self._folder is not None:
            self._server.communicate()
            self._folder.cleanup()
