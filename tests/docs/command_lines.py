"""Whether a command line of the documentation or a job file could be typed: its programs, files, targets, options.

Nothing is started. A program that is not known here is an error, so that no line goes unchecked by accident.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec

from torch.distributed.run import get_args_parser

from tests.docs.pages import REPOSITORY
from thinwire.command_line import make_parser

UNCHECKED = {"cd", "git", "ssh"}
LAUNCHERS = {"mpirun", "srun"}


def check(line: str, files: Collection[str] = (), complete: bool = True) -> None:
    """Raise ValueError, saying what is wrong, for a line that would not work at the repository's root.

    Args:
        line: one or more commands, joined by `&&`.
        files: those that a reader has by then and the repository has not.
        complete: whether it stands for itself; else arguments may be missing.
    """
    for command in line.split("&&"):
        words = [word for word in shlex.split(command, comments=True) if word != "..."]
        if words:
            check_words(words, files, complete)


def check_words(words: Sequence[str], files: Collection[str] = (), complete: bool = True) -> None:
    """The same of one command, as a list of words."""
    variables = next((place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    program, *rest = words[variables:]
    if program == "make":
        _check_targets(rest)
    elif program == "pip":
        _check_extras(rest)
    elif program == "thinwire":
        _check_thinwire(rest, complete)
    elif program == "torchrun":
        _check_torchrun(rest, files, complete)
    elif program in LAUNCHERS:
        _check_launched(rest, files, complete)
    elif program in ("python", "python3"):
        _check_python(rest, files, complete)
    elif program in ("bash", "sbatch"):
        _check_file(rest[0], files)
    elif "/" in program:
        _check_file(program, files)
    elif program not in UNCHECKED:
        raise ValueError(f"cannot check what {program!r} is given; teach tests/docs/command_lines.py")


@cache
def make_targets() -> frozenset[str]:
    """The targets of the Makefile."""
    phony = re.search(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert phony
    return frozenset(phony[1].split())


@cache
def extras() -> frozenset[str]:
    """What can stand in brackets after `pip install .`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return frozenset(project["optional-dependencies"])


def _check_targets(words: Sequence[str]) -> None:
    named = {word for word in words if "=" not in word and not _is_placeholder(word)}
    if not named <= make_targets():
        raise ValueError(f"the Makefile has no target {', '.join(sorted(named - make_targets()))}")


def _check_extras(words: Sequence[str]) -> None:
    named = {extra for word in words for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")}
    if not named <= extras():
        raise ValueError(f"pyproject.toml has no extra {', '.join(sorted(named - extras()))}")


def _check_thinwire(words: Sequence[str], complete: bool) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            make_parser().parse_args(words)
    except SystemExit as ended:
        message = said.getvalue().strip().rpartition("\n")[2]
        if ended.code and (complete or "required" not in message):
            raise ValueError(message) from None


def _check_torchrun(words: Sequence[str], files: Collection[str], complete: bool) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = get_args_parser().parse_args(words)
    except SystemExit:
        raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from None
    module = ["-m"] if parsed.module else []
    _check_python([*module, parsed.training_script, *parsed.training_script_args], files, complete)


def _check_launched(words: Sequence[str], files: Collection[str], complete: bool) -> None:
    """Open MPI's and Slurm's options are theirs; what follows them begins with Python."""
    if "python" in words:
        _check_python(words[words.index("python") + 1 :], files, complete)
    elif complete:
        raise ValueError("expected python and what it runs")


def _check_python(words: Sequence[str], files: Collection[str], complete: bool) -> None:
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif words[0] != "-m":
        _check_file(words[0], files)
    elif words[1] == "thinwire":
        _check_thinwire(words[2:], complete)
    elif not _is_placeholder(words[1]) and find_spec(words[1]) is None:
        raise ValueError(f"there is no module {words[1]}")


def _check_file(name: str, files: Collection[str]) -> None:
    if name not in files and not (REPOSITORY / name).is_file():
        raise ValueError(f"there is no file {name}")


def _is_placeholder(name: str) -> bool:
    """NAME in `make NAME` and in `experiments.NAME`."""
    return name.rpartition(".")[2].isupper()
