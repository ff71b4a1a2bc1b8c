"""Jobs that save, load and prune in one folder at the same time, among entries of others: every save succeeds, what is
loaded is one save, and nothing of anybody else's is touched."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
import threading
import traceback
from pathlib import Path

from tests.chaos.outcome import Outcome, contents, is_documented
from tests.engine.checkpoint.jobs import Values
from thinwire.comm import threads
from thinwire.engine.checkpoint.store import CheckpointStore

TAGS = ("best", "last", "step-1", "step-2")
SEEDS = 6
PATIENCE = 120.0


def run(count: int, seed: int) -> Outcome:
    outcome = Outcome()
    saved = [Values(number, 1, {"w": (5, 3), "bias": (2,)}) for number in range(SEEDS)]
    with contextlib.redirect_stderr(io.StringIO()):
        for number in range(count):
            with tempfile.TemporaryDirectory() as temporary:

                def trial(number: int = number, root: Path = Path(temporary)) -> str | None:
                    return _race(root, saved, f"{seed} {number}")

                if not outcome.attempt(f"seed {seed}, trial {number}", trial):
                    break
    return outcome


def _race(root: Path, saved: list[Values], seed: str) -> str | None:
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
    return "; ".join(faults) or None


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
