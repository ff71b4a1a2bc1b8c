"""Checkpoints that come to harm: a whole one is loaded, or an error of ours says why none is.

`damage`: whatever has happened to whichever file, on all ranks alike. `manifests`: values of other types under a good
seal are passed over or refused with no weight moved, and the engine goes on from the checkpoint before. `folders`: jobs
save, load and prune in one folder at the same time, among entries of others; every save succeeds, what is loaded is one
save, and nothing of anybody else's is touched.
"""

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.chaos.harness import Trial, contents, descend, is_documented, over_seeds
from tests.engine.checkpoint.jobs import Values, save
from tests.engine.tiny import equal, make_engine, settings, train, weights
from thinwire.comm import Communicator, threads
from thinwire.command_line import main
from thinwire.engine import Engine
from thinwire.engine.checkpoint.manifest import _sealed
from thinwire.engine.checkpoint.store import CheckpointStore

# Damaged files

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")


@over_seeds
@contextmanager
def damage() -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as temporary:
        pristine, folder, outside = (Path(temporary) / name for name in ("pristine", "folder", "outside"))
        jobs = {"step-1": Values(1, 2), "step-2": Values(2, 2)}
        save(pristine, *jobs.items())
        outside.mkdir()
        (outside / "target").write_bytes(b"not to be touched")
        before = contents(outside)

        def trial(seed: str) -> Iterator[str]:
            source = random.Random(seed)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pristine, folder)
            done = [_damage(folder, outside, source) for _ in range(source.choice((1, 1, 1, 2, 4)))]
            fault = _load_on_ranks(folder, jobs, source)
            if fault or contents(outside) != before:
                yield f"{done}: {fault or 'something outside was written to'}"

        yield trial


def _load_on_ranks(folder: Path, jobs: dict[str, Values], source: random.Random) -> str | None:
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


def _damage(folder: Path, outside: Path, source: random.Random) -> str:
    """Do something to one file; what it was."""
    names = ["latest", *(f"step-2/{name}" for name in FILES * 3), *(f"step-1/{name}" for name in FILES)]
    name, way = source.choice(names), source.choice(WAYS)
    path = folder / name
    if not path.is_file() or path.is_symlink():
        return f"{name} is gone already"
    other = folder / source.choice(names)
    if way in CHANGES:
        CHANGES[way](path, source)
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


def flip_bits(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(source.choice((1, 1, 1, 2, 8)) if content else 0):
        content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, source: random.Random) -> None:
    os.truncate(path, source.randrange(path.stat().st_size + 1))


def lengthen(path: Path, source: random.Random) -> None:
    path.write_bytes(path.read_bytes() + source.randbytes(source.randrange(1, 100)))


def zero(path: Path, source: random.Random) -> None:
    """As a loss of power leaves blocks."""
    content = bytearray(path.read_bytes())
    start = source.randrange(len(content) + 1)
    length = len(content[start : start + 4096])
    content[start : start + length] = bytes(length)
    path.write_bytes(content)


CHANGES = {"flip bits": flip_bits, "truncate": truncate, "lengthen": lengthen, "zero": zero}


# Manifests

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 0}}
OPTIMIZERS = {
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 2},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 2},
    "ZeroOneAdam": {"lr": 1e-2},
    "AdamW": {"lr": 1e-2},
    "DiLoCo": {"lr": 1e-2, "every": 2, "fragments": 2, "overlap": 1, "codec": "int8", "block_size": 64},
}
VALUES: list[Any] = [None, True, -1, 1.5, 10**30, float("inf"), "", "text", "1", [], [None], [[1]], {}, {"a": None}]


@over_seeds
@contextmanager
def manifests() -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        jobs = [
            _saved(Path(temporary) / f"{name}-{stage}", name, stage)
            for name in OPTIMIZERS
            for stage in (0, 1)[: 1 + (name != "DiLoCo")]
        ]

        def trial(seed: str) -> Iterator[str]:
            source = random.Random(seed)
            engine, folder, whole = source.choice(jobs)
            body = json.loads(whole)
            del body["sha256"]
            renamed = source.random() < 0.25
            where = _rename(body, source) if renamed else _change(body, source)
            (folder / "newer" / "manifest.json").write_bytes(_sealed(body))
            fault = _load_into(engine, folder, source, renamed)
            if fault:
                yield f"{folder.name} {where}: {fault}"

        yield trial


def _saved(folder: Path, optimizer: str, stage: int) -> tuple[Engine, Path, bytes]:
    """A job with two checkpoints, and the manifest of the newer."""
    chosen = {"type": optimizer, "params": OPTIMIZERS[optimizer]}
    engine = make_engine(None, settings(stage, optimizer=chosen, scheduler=SCHEDULE))
    train(engine, range(3))
    engine.save_checkpoint(folder, "older")
    train(engine, range(3, 4))
    engine.save_checkpoint(folder, "newer", client_state={"epoch": 1})
    return engine, folder, (folder / "newer" / "manifest.json").read_bytes()


def _change(body: dict[str, Any], source: random.Random) -> str:
    """Put another value, or none, in one place; where and what."""
    place, inner, key = descend(body, source)
    below = inner[key]
    if isinstance(inner, dict) and source.random() < 0.15:
        del inner[key]
        return f"without {place}"
    inner[key] = source.choice([value for value in VALUES if type(value) is not type(below) or source.random() < 0.2])
    return f"{place} = {inner[key]!r}"


def _rename(body: dict[str, Any], source: random.Random) -> str:
    """Call something in a rank's file by another name."""
    file = source.choice(body["files"])
    table = source.choice(("slices", "slices", "rank_tensors", "buffers"))
    if table == "slices":
        one, field = source.choice(file["slices"]), source.choice(("kind", "kind", "name", "start"))
        one[field] = source.choice([each[field] for each in file["slices"] if each[field] != one[field]] or [None])
        return f"renamed {field} to {one[field]!r}"
    name = source.choice(sorted(file[table]))
    file[table][f"{name}x"] = file[table].pop(name)
    return f"renamed {name!r} of {table}"


def _load_into(engine: Engine, folder: Path, source: random.Random, renamed: bool) -> str | None:
    """Load; what was wrong, an error's own traceback among it."""
    before = weights(engine.module)
    tag = source.choice((None, "newer"))
    try:
        path, _ = engine.load_checkpoint(folder, tag)
        if renamed and not str(path).endswith("older"):
            return "what was renamed was loaded"
    except Exception as error:
        if not is_documented(error) or (renamed and tag is None):
            raise
        if not equal(weights(engine.module), before):
            return f"weights had moved when it was refused: {error}"
        if engine.load_checkpoint(folder, "older")[0] is None:
            return "the checkpoint before it was not loaded"
    for command in ("verify", "inspect"):
        with contextlib.redirect_stderr(io.StringIO()):
            main(["checkpoint", command, str(folder), "--tag", "newer"])
    return None


# Folders

TAGS = ("best", "last", "step-1", "step-2")
SEEDS = 6
PATIENCE = 120.0


@over_seeds
@contextmanager
def folders() -> Iterator[Trial]:
    saved = [Values(number, 1, {"w": (5, 3), "bias": (2,)}) for number in range(SEEDS)]

    def trial(seed: str) -> list[str]:
        with tempfile.TemporaryDirectory() as temporary:
            return _race(Path(temporary), saved, seed)

    with contextlib.redirect_stderr(io.StringIO()):
        yield trial


def _race(root: Path, saved: list[Values], seed: str) -> list[str]:
    source = random.Random(seed)
    folder, outside = root / "folder", root / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "target").write_bytes(b"not to be touched")
    before = contents(outside)
    faults: list[str] = []

    def live(work: object, seed: float) -> None:
        try:
            work(folder, outside, saved, random.Random(seed))  # type: ignore[operator]
        except Exception:
            faults.append(traceback.format_exc(limit=-4))

    works = [_save, _save, source.choice((_save, _load, _litter)), source.choice((_load, _litter))]
    running = [threading.Thread(target=live, args=(work, source.random()), daemon=True) for work in works]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    live(_end, 0.0)
    if contents(outside) != before:
        faults.append("something outside was written to")
    return faults


def _save(folder: Path, outside: Path, saved: list[Values], source: random.Random) -> None:
    store = CheckpointStore(folder, threads.single(PATIENCE), source.choice((None, 2)), source.random() < 0.5)
    for _ in range(source.randint(1, 3)):
        tag, values = source.choice(TAGS), source.choice(saved)
        try:
            assert store.save(tag, values.snapshot(0)), "a save has failed"
        except ValueError as error:
            if not is_documented(error):
                raise
        assert store.wait(), "a save has failed"
        if source.random() < 0.3:
            _load_one(store, saved, None)


def _load(folder: Path, outside: Path, saved: list[Values], source: random.Random) -> None:
    for _ in range(source.randint(1, 6)):
        _load_one(CheckpointStore(folder, threads.single(PATIENCE)), saved, source.choice((None, *TAGS)))


def _load_one(store: CheckpointStore, saved: list[Values], tag: str | None) -> None:
    try:
        checkpoint = store.load(tag)
    except Exception as error:
        if not is_documented(error):
            raise
        return
    if checkpoint is not None:
        with checkpoint:
            saved[checkpoint.counters()["seed"]].check(checkpoint, random.Random(0))


def _litter(folder: Path, outside: Path, saved: list[Values], source: random.Random) -> None:
    """What others may put into the folder."""
    for number in range(source.randint(1, 4)):
        name = folder / source.choice(
            (f"notes-{number}", f"\udcff-{number}", f".x.0000000{number}.removed", f".x.0000000{number}.partial")
        )
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            match source.randrange(4):
                case 0:
                    name.mkdir()
                    (name / "rank-00000.safetensors").write_bytes(b"half")
                case 1:
                    name.symlink_to(outside)
                case 2:
                    os.mkfifo(name)
                case _:
                    with name.open("xb") as file:  # to a FIFO that another has put there it would write for ever
                        file.write(b"notes")


def _end(folder: Path, outside: Path, saved: list[Values], source: random.Random) -> None:
    """After a last save the newest is loaded, and nothing that was under way is left."""
    store = CheckpointStore(folder, threads.single(PATIENCE))
    assert store.save("end", saved[0].snapshot(0)), "the last save has failed"
    checkpoint = store.load()
    assert checkpoint is not None
    with checkpoint:
        assert checkpoint.tag == "end"
        saved[0].check(checkpoint, random.Random(0))
    left = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    assert not left, f"left behind: {left}"
