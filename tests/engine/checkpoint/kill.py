"""Kills ranks of a job that saves in a loop, and looks at what is left: ``python -m tests.engine.checkpoint.kill 100``.

Every job goes on from what the one before it has left behind. Half of the kills come at a random time, half at a
random one of the calls by which a save changes the folder; ``sweep`` instead of a number stops one rank at each of
these, ``sweep 100`` does both.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire import comm
from thinwire.comm import CommunicationError, Communicator, threads
from thinwire.engine.checkpoint.folder import LOCK
from thinwire.engine.checkpoint.loading import LoadedCheckpoint
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.zero import SavedSlice

MODEL = ModelDescription({"embedding": ((7, 11), torch.float32), "bias": ((3,), torch.float32)})
KINDS = ("weight", "master", "exp_avg")
TIMEOUT = 20.0
# Of a save of the smallest job on rank 0, and a half more: some kills come in the second save.
MOST_CALLS = 115
LONGEST_DELAY = 0.06


@dataclass(frozen=True)
class Trial:
    """One job and its end.

    `call` is the number of the victim's call that kills it, None to kill it after `delay` seconds. The other ranks are
    `orphans`, who find out by themselves, or a launcher ends them as well.
    """

    size: int
    victim: int
    asynchronous: bool
    orphans: bool
    call: int | None
    delay: float

    @classmethod
    def random(cls, source: random.Random) -> Trial:
        size = source.choice((1, 2, 3))
        call = source.randrange(MOST_CALLS) if source.random() < 0.5 else None
        victim, asynchronous, orphans = source.randrange(size), source.random() < 0.3, source.random() < 0.1
        return cls(size, victim, asynchronous, orphans, call, source.random() * LONGEST_DELAY)


def snapshot_of(number: int, rank: int, size: int) -> Snapshot:
    """The number of the save, in every value of every rank."""
    slices = []
    for kind in KINDS:
        for name in MODEL.parameters:
            numel = MODEL.numel(name)
            cuts = [numel * part // size for part in range(size + 1)]
            values = torch.full((cuts[rank + 1] - cuts[rank],), float(number))
            slices.append(SavedSlice(kind, name, cuts[rank], values))
    return Snapshot(
        slices,
        MODEL,
        rank_tensors={"residual": torch.full((5, 2), float(number))},
        shared={"number": number},
        rank_values={"number": number},
        buffers={"running": torch.tensor(number)},
    )


def number_in(checkpoint: LoadedCheckpoint) -> int:
    """The number that all values of a checkpoint have; AssertionError where they are not all the same."""
    numbers: set[float] = {checkpoint.shared["number"], checkpoint.buffers()["running"].item()}
    assert checkpoint.kinds() == set(KINDS)
    for kind in KINDS:
        for name in MODEL.parameters:
            numbers |= set(checkpoint.read(kind, name, 0, MODEL.numel(name)).tolist())
    for rank in range(checkpoint.world_size):
        numbers |= set(checkpoint.read_rank("residual", rank).flatten().tolist())
        numbers.add(checkpoint.rank_values(rank)["number"])
    assert len(numbers) == 1, f"a mix of saves {sorted(numbers)}"
    return int(numbers.pop())


def save_forever(world: Communicator, folder: Path, ledger: int, trial: Trial) -> None:
    """Continue from the folder, and write to `ledger` the number of every save that is known to be published."""
    store = CheckpointStore(folder, world, asynchronous=trial.asynchronous)
    loaded = store.load(description=MODEL)
    number = number_in(loaded) if loaded else 0
    os.write(ledger, b"0\n")
    if trial.call is not None and world.rank == trial.victim:
        kill_self_at_call(trial.call, str(folder))
    while True:
        number += 1
        # Three in a row replace one another.
        tag = "best" if number % 5 < 3 else f"step-{number}"
        assert store.save(tag, snapshot_of(number, world.rank, world.size))
        assert store.wait()
        os.write(ledger, f"{number}\n".encode())


def kill_self_at_call(number: int, folder: str) -> None:
    """End this process by SIGKILL instead of its `number`th call about a name in the folder."""
    left = [number]

    def count() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    before_calls(folder, count)


def before_calls(folder: str, act: Callable[[], None]) -> None:
    """From now on `act` before every call about a name in the folder."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        names = [str(argument) for argument in arguments if isinstance(argument, (str, os.PathLike))]
        if (event == "open" or event.startswith("os.")) and any(name.startswith(folder) for name in names):
            act()

    sys.addaudithook(hook)


def run(trial: Trial, folder: Path) -> int:
    """Run one job to its end; the last number that a rank has seen published."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reader, writer = os.pipe()
    processes = [fork(lambda rank=rank: live(rank, port, folder, writer, trial)) for rank in range(trial.size)]
    os.close(writer)
    with os.fdopen(reader) as ledger:
        if trial.call is None:
            first = [ledger.readline() for _ in range(trial.size)]
            assert first == ["0\n"] * trial.size, "a rank has failed before the kill"
            time.sleep(trial.delay)
            os.kill(processes[trial.victim], signal.SIGKILL)
        end = exit_code(processes.pop(trial.victim))
        assert end == -signal.SIGKILL, f"{trial}: the victim ended with {end}"
        if not trial.orphans:
            for process in processes:
                os.kill(process, signal.SIGKILL)
        numbers = [int(line) for line in ledger]
    others = [exit_code(process) for process in processes]
    assert set(others) <= ({0} if trial.orphans else {0, -signal.SIGKILL}), f"{trial}: the others ended with {others}"
    return max(numbers, default=0)


def exit_code(process: int) -> int:
    """Of a child, once it is over; negative is the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def live(rank: int, port: int, folder: Path, ledger: int, trial: Trial) -> None:
    place = {"RANK": rank, "WORLD_SIZE": trial.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    world = comm.init(timeout=TIMEOUT, quiet=True) if trial.size > 1 else threads.single(TIMEOUT)
    try:
        save_forever(world, folder, ledger, trial)
    except CommunicationError:
        return  # another rank was killed


def fork(body: Callable[[], None]) -> int:
    """Start a process without importing torch again."""
    process = os.fork()
    if process:
        return process
    try:
        body()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def sweep(asynchronous: bool) -> str:
    """Stop a rank at each of its calls: what is in the folder then, which a kill would leave, is copied and gone on
    from. AssertionError where no whole checkpoint, a mix or an old one is left, or nothing can be saved to it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, copies = Path(temporary, "checkpoints"), Path(temporary, "copies")
        published, saved, copying = [], 0, False

        def copy() -> None:
            nonlocal copying
            if not copying and folder.exists():
                copying = True
                shutil.copytree(folder, copies / str(len(published)))
                published.append(saved)
                copying = False

        before_calls(str(folder), copy)
        store = CheckpointStore(folder, threads.single(TIMEOUT), asynchronous=asynchronous)
        for number in range(1, 4):  # two of one name
            assert store.save("best" if number < 3 else "other", snapshot_of(number, 0, 1))
            assert store.wait()
            saved = number
        copying = True  # no more
        for number, least in enumerate(published):
            store = CheckpointStore(copies / str(number), threads.single(TIMEOUT))
            loaded = store.load(description=MODEL)
            found = number_in(loaded) if loaded else 0
            assert found in (least, least + 1), f"call {number}: save {least} was published, {found} is loaded"
            assert store.save("best", snapshot_of(found + 1, 0, 1))
            loaded = store.load(description=MODEL)
            assert number_in(loaded) == found + 1, f"call {number}: the next save"
        return f"{len(published)} calls"


def kill_all(trials: Iterable[Trial]) -> str:
    """Raise AssertionError for the first job after which no whole checkpoint, a mix or an old one is left."""
    kills = leftovers = last = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoints"
        for trial in trials:
            kills += 1
            published = max(last, run(trial, folder))
            leftovers += any(path.name.startswith(".") and path.name != LOCK for path in folder.glob("*"))
            checkpoint = CheckpointStore(folder, threads.single(TIMEOUT)).load(description=MODEL)
            last = number_in(checkpoint) if checkpoint else 0
            assert last >= published, f"{trial}: save {published} was published, {last} is loaded"
    seconds = time.monotonic() - start
    return f"{kills} kills, {leftovers} of them left half a save; {last} saves, {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    chosen = parser.parse_args()
    source = random.Random(chosen.seed)
    print(f"seed {chosen.seed}", file=sys.stderr)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    for one in chosen.what:
        if one == "sweep":
            print(f"{one}: {sweep(False)}, {sweep(True)} in the background")
        else:
            print(f"{one}: {kill_all(Trial.random(source) for _ in range(int(one)))}")


if __name__ == "__main__":
    main()
