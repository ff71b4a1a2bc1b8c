"""Command lines of the documentation name targets, files and options that exist; configurations can be loaded.

Nothing is started. A program that is not known here is an error, so that no line goes unchecked by accident."""

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.docs.pages import REPOSITORY, blocks, pages, spans
from thinwire.command_line import make_parser
from thinwire.engine import load_config

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
        raise ValueError(f"cannot check what {program!r} is given; teach tests/docs/test_command_lines.py")


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


COMMAND = re.compile(r"(make|pip|thinwire|torchrun|mpirun|srun|sbatch|python -[cm]) ")


ENGINE_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu"}


SHOWN = [(page, "".join(f"{line}\n" for line in page.read_text().splitlines())) for page in pages()]


SAVED = {name for _, text in SHOWN for name in re.findall(r"Save this as `([^`]+)`", text)}


def lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def wrong(page: Path) -> list[str]:
    """What is wrong with the command lines of a page, each with its place."""
    shown = [
        (str(block), line, True) for block in blocks(page) if block.language == "bash" for line in lines(block.text)
    ]
    shown += [
        (str(block), line.removeprefix("$ "), True)
        for block in blocks(page)
        if block.language == "console"
        for line in lines(block.text)
        if line.startswith("$ ")
    ]
    shown += [(f"{page}:{line}", text, False) for line, text in spans(page) if COMMAND.match(text)]
    found = []
    for place, line, complete in shown:
        try:
            check(line, SAVED, complete)
        except ValueError as error:
            found.append(f"{place}: {line.strip()}: {error}")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_command_lines(page: Path) -> None:
    assert not wrong(page)


def test_engine_configurations() -> None:
    """Those in fences, and those in files."""
    files = [*REPOSITORY.glob("examples/*.json"), *REPOSITORY.glob("experiments/configs/*.json")]
    texts = {str(path): path.read_text() for path in files}
    texts |= {str(block): block.text for page in pages() for block in blocks(page) if block.language == "json"}
    checked = 0
    for place, text in texts.items():
        content = json.loads(text)
        if ENGINE_KEYS & content.keys():
            try:
                load_config(content, world_size=2)
            except ValueError as error:
                raise AssertionError(f"{place}: {error}") from error
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make tests", "no target tests"),
        ("pip install '.[gpu]'", "no extra gpu"),
        ("thinwire plan --nodes 4 --gigabits 1", "unrecognized arguments: --gigabits"),
        ("thinwire checkpoint verify runs --deep", "unrecognized arguments: --deep"),
        ("torchrun --nproc-per-node 2 nothing.py", "no file nothing.py"),
        ("torchrun --processes 2 examples/engine.py", "processes"),
        ("mpirun -n 2 python nothing.py", "no file nothing.py"),
        ("mpirun -n 2", "expected python"),
        ("python -m thinwire.nothing", "no module thinwire.nothing"),
        ("cd docs && examples/nothing.sh", "no file examples/nothing.sh"),
        ("frobnicate --now", "cannot check"),
    ],
)
def test_what_would_not_work_is_an_error(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(line)
