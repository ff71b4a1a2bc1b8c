"""Damaged checkpoints: whatever has happened to whichever file, a whole one is loaded or an error is raised, on all
ranks alike."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import torch

from tests.chaos.outcome import Outcome, contents, is_documented
from tests.engine.checkpoint.jobs import Values, save
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.store import CheckpointStore

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")


def run(count: int, seed: int) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as temporary:
        pristine, folder, outside = (Path(temporary) / name for name in ("pristine", "folder", "outside"))
        jobs = {"step-1": Values(1, 2), "step-2": Values(2, 2)}
        save(pristine, *jobs.items())
        outside.mkdir()
        (outside / "target").write_bytes(b"not to be touched")
        before = contents(outside)
        for number in range(count):
            source = random.Random(f"{seed} {number}")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pristine, folder)
            done = [damage(folder, outside, source) for _ in range(source.choice((1, 1, 1, 2, 4)))]

            def trial(source: random.Random = source) -> str | None:
                fault = load(folder, jobs, source)
                return fault or (None if contents(outside) == before else "something outside was written to")

            if not outcome.attempt(f"seed {seed}, trial {number}, {done}", trial):
                break
    return outcome


def load(folder: Path, jobs: dict[str, Values], source: random.Random) -> str | None:
    """Load on some ranks; what was wrong."""
    tag, size = source.choice((None, None, "step-1", "step-2")), source.choice((1, 1, 1, 2, 3))

    def work(comm: Communicator) -> str:
        try:
            checkpoint = CheckpointStore(folder, comm).load(tag)
        except Exception as error:
            if not is_documented(error):
                raise
            return f"refused: {error}"
        if checkpoint is None:
            return "none"
        with checkpoint:
            jobs[checkpoint.tag].check(checkpoint, random.Random(comm.rank))
            return checkpoint.tag

    found = threads.run(work, size)
    return None if len(set(found)) == 1 else f"ranks differ: {found}"


WAYS = (
    *("flip bits",) * 4,
    *("truncate",) * 2,
    *("lengthen", "zero", "swap", "swap", "remove", "put a folder", "put a FIFO", "put a link", "put a pickle"),
)


def damage(folder: Path, outside: Path, source: random.Random) -> str:
    """Do something to one file; what it was."""
    names = ["latest", *(f"step-2/{name}" for name in FILES * 3), *(f"step-1/{name}" for name in FILES)]
    name, way = source.choice(names), source.choice(WAYS)
    path = folder / name
    if not path.is_file() or path.is_symlink():
        return f"{name} is gone already"
    other = folder / source.choice(names)
    if way in ("flip bits", "lengthen", "zero"):
        change(path, way, source)
    elif way == "truncate":
        os.truncate(path, source.randrange(path.stat().st_size + 1))
    elif way == "swap":
        if other.is_file() and other != path:
            first, second = path.read_bytes(), other.read_bytes()
            path.write_bytes(second)
            other.write_bytes(first)
    elif way == "put a pickle":
        torch.save({"weight": torch.zeros(3)}, path, _use_new_zipfile_serialization=source.random() < 0.5)
    else:
        path.unlink()
        if way == "put a folder":
            path.mkdir()
        elif way == "put a FIFO":
            os.mkfifo(path)
        elif way == "put a link":
            targets = (outside / "target", outside / "nothing", Path("/dev/zero"), path, other, outside)
            path.symlink_to(source.choice(targets))
    return f"{way} {name}"


def change(path: Path, way: str, source: random.Random) -> None:
    """Give a file other bytes."""
    content = bytearray(path.read_bytes())
    if way == "lengthen":
        content += source.randbytes(source.randrange(1, 100))
    elif way == "zero":  # as a loss of power leaves blocks
        start = source.randrange(len(content) + 1)
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    else:
        for _ in range(source.choice((1, 1, 8))):
            if content:
                content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(content)
