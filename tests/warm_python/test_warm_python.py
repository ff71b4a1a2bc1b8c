"""A program that starts warm is, to whoever started it, the program."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launching import WHOLLY, Jobs
from tests.warm_python import WarmPython

pytestmark = pytest.mark.launch


def write(folder: Path, *lines: str) -> str:
    path = folder / "program.py"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_arguments_environment_streams_and_exit_code(jobs: Jobs, tmp_path: Path) -> None:
    program = write(
        tmp_path,
        "import os, sys",
        "print(sys.argv[1:], os.environ['GIVEN'], 'HOME' in os.environ, os.getcwd(), sys.executable, __name__)",
        "print('told', sys.stdin.read(), file=sys.stderr)",
        "sys.exit(7)",
    )
    done = subprocess.run(
        [jobs.python, "-u", program, "one", "two words"],
        env={"GIVEN": "a value"},
        cwd=tmp_path,
        input="something",
        capture_output=True,
        text=True,
    )
    expected = f"['one', 'two words'] a value False {tmp_path} {jobs.python} __main__\n"
    assert (done.returncode, done.stdout, done.stderr) == (7, expected, "told something\n")


def test_code_on_the_command_line(jobs: Jobs) -> None:
    done = jobs.alone("-c", "import sys; print(sys.argv, sys.path[0], __name__, sys.stdin.readline())", "one")
    assert done.stdout.split() == ["['-c',", "'one']", "__main__"]


def test_an_error_and_what_runs_at_exit(jobs: Jobs, tmp_path: Path) -> None:
    late = "threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()"
    # Of what is taken apart last, without what may have gone before.
    gone = "sys.gone = type('Gone', (), {'__del__': lambda self, write=os.write: write(1, b'gone\\n')})()"
    before = ["import atexit, os, sys, threading, time", "atexit.register(print, 'at exit')", late, gone]
    for last, code, told, more in (
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n", {}),
        ("sys.exit('no')", 1, "no\n", {}),
        ("sys.exit(300)", 44, "", {}),
        ("sys.exit('no')", 1, "no\n", WHOLLY),
    ):
        done = jobs.alone(write(tmp_path, *before, last), **more)
        assert (done.returncode, done.stdout) == (code, "a thread\nat exit\n" + "gone\n" * bool(more))
        assert done.stderr.partition("nanobind: leaked")[0].endswith(told)  # Triton's, when it is taken apart


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(jobs: Jobs, tmp_path: Path, number: signal.Signals) -> None:
    program = write(tmp_path, "import os, time", "print(os.getpid(), flush=True)", "time.sleep(1000)")
    process = subprocess.Popen([jobs.python, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    process.send_signal(number)
    assert process.stdout.read() == ""  # its end of the pipe is closed
    assert process.wait() == -number
    assert forked != process.pid


def test_a_crash_is_a_crash(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.alone(write(tmp_path, "import os", "os.kill(os.getpid(), 6)")).returncode == -signal.SIGABRT


def test_nothing_outlives_the_owner(tmp_path: Path) -> None:
    owner = WarmPython(modules=())
    program = write(tmp_path, "import time", "print('up', flush=True)", "time.sleep(1000)")
    process = subprocess.Popen([owner.path, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    owner.close()
    process.communicate()
    assert process.returncode != 0
    assert not os.path.exists(owner.path)
