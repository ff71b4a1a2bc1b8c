"""Training that saves after every step and is killed by SIGKILL again and again: what is resumed goes on with the
losses, and ends with the weights, of a run that nobody killed.

``python -m tests.chaos.kills OneBitAdam-1 40 7`` kills one form 40 times, from seed 7. It starts processes by forking
before anything has run a backward, which torch does not survive: `run` starts one such process for each form.
"""

import hashlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.chaos.harness import Outcome, in_own_process
from tests.engine.checkpoint.kill import exit_code, fork, kill_self_at_call
from tests.engine.tiny import make_engine, settings, train
from tests.launching import free_port
from thinwire import comm as communication
from thinwire.comm import CommunicationError, Communicator, threads
from thinwire.compress import make_codec
from thinwire.compress.codecs import CodecName
from thinwire.engine import Engine
from thinwire.zero import tensor_on_disk

RANKS = 2
STEPS = 24
FREEZE = 8
TIMEOUT = 60.0
LONGEST_DELAY = 0.6
# Of about three saves.
MOST_CALLS = 250

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 3e-3, "freeze_step": FREEZE, "block_size": 64},
    "OneBitLamb": {"lr": 3e-3, "freeze_step": FREEZE, "block_size": 64},
    "ZeroOneAdam": {
        "lr": 3e-3,
        "var_freeze_step": FREEZE,
        "var_update_scaler": 2,
        "local_step_scaler": 3,
        "local_step_clipper": 4,
        "block_size": 64,
    },
    "OneBitLion": {"lr": 3e-4, "block_size": 64},
    "OneBitMuon": {"lr": 3e-3, "codec": ["stat2", "sign1"], "block_size": 64},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
}


@dataclass(frozen=True)
class Form:
    """An optimizer at a stage, its ranks threads of one process or `processes` on Gloo; `codec`: of an exact one. By
    node there are two hosts of two ranks, else each rank is a worker. On `disk`, state, gradients and at stage 3
    parameters rest in files beside the checkpoints, and every second kill comes as one of those is opened."""

    optimizer: str
    stage: int
    processes: bool = False
    codec: CodecName | None = None
    by_node: bool = False
    disk: bool = False

    def __str__(self) -> str:
        unusual = {"-processes": self.processes, self.codec or "": True, "-nodes": self.by_node, "-disk": self.disk}
        return f"{self.optimizer}-{self.stage}" + "".join(word for word, has in unusual.items() if has)

    @property
    def hosts(self) -> list[int]:
        """The host of each rank, by number."""
        return [0, 1, 1, 0] if self.by_node else [0] * RANKS

    def config(self, beside: Path) -> dict[str, Any]:
        """For a job whose checkpoints are in a folder beside this one, of swapped state."""
        optimizer = {"type": self.optimizer, "params": _OPTIMIZERS[self.optimizer]}
        more = (
            {"thinwire": {"resync_interval": 5}} if self.optimizer != "AdamW" else {"communication_codec": self.codec}
        )
        config = settings(self.stage, optimizer=optimizer, gradient_clipping=0.5, **more)
        if self.disk:
            config["bf16"] = {"enabled": True}
            nvme = {"device": "nvme", "nvme_path": str(beside)}
            config["zero_optimization"] |= {"offload_optimizer": nvme}
            config["zero_optimization"] |= {"offload_param": nvme} if self.stage == 3 else {}
        return config


FORMS = [
    *(Form("OneBitAdam", stage) for stage in (0, 1, 2)),
    *(Form(name, stage) for name in ("OneBitLamb", "ZeroOneAdam", "OneBitLion") for stage in (0, 1)),
    *(Form("OneBitMuon", stage) for stage in (0, 1)),
    *(Form("AdamW", stage) for stage in (1, 2)),
    *(Form("AdamW", stage, codec="int4") for stage in (0, 1, 2)),
    *(Form("AdamW", stage, disk=True) for stage in (1, 2)),
    *(Form("AdamW", stage, processes=True, disk=True) for stage in (2, 3)),
    Form("OneBitAdam", 1, processes=True),
    Form("AdamW", 3, processes=True),
    *(Form("OneBitMuon", stage, by_node=True) for stage in (0, 1)),
    *(Form("AdamW", stage, codec="int4", by_node=True) for stage in (0, 1)),
    *(Form(name, 1, by_node=True) for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "OneBitLion")),
]


@dataclass(frozen=True)
class Life:
    """One job, from its resume to its end: killed at the `call`th of its calls that change the folder, `delay` seconds
    after it was ready, or, without either, not at all. `victim`: the rank that is killed first, of processes."""

    form: Form
    folder: Path
    call: int | None = None
    delay: float | None = None
    victim: int = 0


def train_on(world: Communicator, life: Life, ledger: int) -> None:
    """Resume, train to the end and save after every step; rank 0 tells the ledger of every step."""
    swapped = life.folder.parent / "swapped"
    engine = make_engine(world, life.form.config(swapped))
    assert not life.form.by_node or engine.optimizer.counters()["nodes"] == life.form.hosts
    if any(life.folder.glob("*")):
        engine.load_checkpoint(life.folder)
    if world.rank == 0:
        os.write(ledger, f"ready {engine.global_steps}\n".encode())
    if life.call is not None and world.rank == life.victim:
        kill_self_at_call(life.call, str(swapped if life.form.disk else life.folder))
    for step in range(engine.global_steps, STEPS):
        (loss,) = train(engine, [step])
        if world.rank == 0:
            os.write(ledger, f"loss {step} {loss.hex()}\n".encode())
        assert engine.save_checkpoint(life.folder)
        if world.rank == 0:
            os.write(ledger, f"saved {step + 1}\n".encode())
    digests = world.all_gather_bytes(digest_of(engine).encode())
    if world.rank == 0:
        os.write(ledger, f"weights {b' '.join(digests).decode()}\n".encode())


def digest_of(engine: Engine) -> str:
    """Of this rank's bits of all weights."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(own.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def live(life: Life, rank: int | None, port: int, ledger: int) -> None:
    """What a process does: one rank, or all of them where `rank` is None."""
    hosts = life.form.hosts
    if rank is None:
        socket.gethostname = lambda: f"host {hosts[communication.init().rank]}"  # where ranks look for nodes
        threads.run(lambda world: train_on(world, life, ledger), len(hosts), TIMEOUT)
        return
    place = {"RANK": rank, "WORLD_SIZE": len(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    world = communication.init(timeout=TIMEOUT, quiet=True)
    try:
        train_on(world, life, ledger)
        world.barrier()
    except CommunicationError:
        if life.call is None and life.delay is None:
            raise


def run_life(life: Life) -> tuple[list[str], bool]:
    """What the ledger of a job says, and whether the job was killed."""
    port = free_port()
    reader, writer = os.pipe()
    ranks: list[int | None] = [*range(len(life.form.hosts))] if life.form.processes else [None]
    processes = [fork(lambda rank=rank: live(life, rank, port, writer)) for rank in ranks]
    victim = processes[life.victim] if life.form.processes else processes[0]
    os.close(writer)
    with os.fdopen(reader) as ledger:
        lines = [ledger.readline()]
        if life.delay is not None:
            time.sleep(life.delay)
            os.kill(victim, signal.SIGKILL)
        end = exit_code(victim)
        killed = end == -signal.SIGKILL
        if killed:  # a launcher ends the others
            for process in processes:
                if process != victim:
                    os.kill(process, signal.SIGKILL)
        others = [exit_code(process) for process in processes if process != victim]
        lines += list(ledger)
    if not killed and {end, *others} != {0}:
        lines.append(f"failed {end} {others}")
    return [line.strip() for line in lines if line.strip()], killed


class Comparison:
    """What jobs tell, held against a run that nobody killed."""

    def __init__(self, expected: list[str]) -> None:
        self.bad: list[str] = []
        self._told = {line.rsplit(" ", 1)[0] for line in expected if line.startswith("loss")}
        self._expected = set(expected)
        self._weights = [line for line in expected if line.startswith("weights")]
        self._saved = 0

    def hear(self, lines: list[str]) -> bool:
        """Take one job's lines; whether it came to its end."""
        for line in lines:
            kind, number, *_ = line.split()
            if kind == "ready" and int(number) < self._saved:
                self.bad.append(f"step {self._saved} was saved, {number} is resumed")
            elif kind == "saved":
                self._saved = int(number)
            elif kind == "failed" or (kind in ("loss", "weights") and line not in self._expected):
                self.bad.append(f"{line}, where none was killed: {self._of_the_same(line)}")
        ended = any(line.startswith("weights") for line in lines)
        if ended:
            self._saved = 0
        return ended

    def _of_the_same(self, line: str) -> str:
        start = line.rsplit(" ", 1)[0] if line.startswith("loss") else line.split()[0]
        return next((one for one in self._expected if one.startswith(f"{start} ")), "nothing of it")


def kill_form(form: Form, count: int, seed: str) -> tuple[int, list[str]]:
    """Kill jobs of a form so often; how often it was, and what was wrong."""
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        lines, _ = run_life(Life(form, Path(temporary) / "unharmed"))
        comparison = Comparison(lines)
        if not any(line.startswith("weights") for line in lines):
            return 0, [f"{form}: the unharmed run failed: {lines[-3:]}"]
        kills = runs = 0
        while kills < count and not comparison.bad:
            at_call = source.random() < 0.5
            call = source.randrange(MOST_CALLS) if at_call else None
            delay = None if at_call else source.random() * LONGEST_DELAY
            life = Life(form, Path(temporary) / f"run-{runs}", call, delay, source.randrange(len(form.hosts)))
            lines, killed = run_life(life)
            kills += killed
            runs += comparison.hear(lines)
        lines, _ = run_life(Life(form, Path(temporary) / f"run-{runs}"))
        if not comparison.hear(lines):
            comparison.bad.append(f"the last job did not come to its end: {lines[-3:]}")
    return kills, [f"{form}, seed {seed}, after {kills} kills: {fault}" for fault in comparison.bad]


def run(count: int, seed: int, forms: list[Form] = FORMS, python: str = sys.executable) -> Outcome:
    """Kill each form so often."""
    outcome = Outcome()
    for form in forms:
        ended = in_own_process(python, "tests.chaos.kills", str(form), str(count), f"{seed}")
        first, *bad = ended.stdout.splitlines() or ["0"]
        if ended.returncode or int(first) < count:
            bad.append(f"{form}: {ended.returncode}, {first} kills, {ended.stderr[-800:]}")
        outcome.note(bad)
        outcome.tried += int(first) - 1
    return outcome


def load_kernels(*codecs: CodecName) -> None:
    """Once for all processes that are forked."""
    for codec in (make_codec(name, 64) for name in codecs):
        packets = torch.zeros(1, codec.packet_bytes(64), dtype=torch.uint8)
        codec.encode(torch.ones(64), None, packets, 64)
        codec.decode(packets, torch.empty(64), 64)


def main(name: str, count: int, seed: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    form = next(one for one in FORMS if str(one) == name)
    load_kernels("sign1", "stat2", "int4", "int8")
    tensor_on_disk._FEWEST_NUMEL = 16
    kills, bad = kill_form(form, count, seed)
    print("\n".join([str(kills), *(line.replace("\n", " ") for line in bad)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
