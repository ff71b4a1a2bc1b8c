"""Elastic DiLoCo whose workers are killed by SIGKILL, held up, join, or die while joining: those that are left end with
the same weights, an account of every outer step in which nothing is lost or counted twice, and a loss within 1% of a
run that nobody disturbed, or with `stat2` within its scatter. So do those with a worker among them that sends garbage,
under `guard=3`, but for the account. In every other job a worker is a node of two ranks, either of which may be the
victim: the other one then ends with an error that names it. Codecs take turns, without shared moments and with them,
and then what is in common of these ends alike too.

``python -m tests.chaos.elastic 50 7`` runs 50 jobs from seed 7, with ``garbage`` behind it those of the second kind.
Half of the kills come at a random time, half at a random one of the calls by which the victim takes part. Processes
are forked before anything has run a backward, which torch does not survive: `run` starts one such process.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore

import thinwire
from tests.chaos import accounts
from tests.chaos.harness import judged, of_jobs
from tests.chaos.hosts import Hosts
from tests.chaos.kills import load_kernels
from tests.engine.checkpoint.kill import exit_code, fork
from tests.launching import free_port
from tests.optim.diloco.tower import Tower, flat
from thinwire.comm import CommunicationError, Communicator, TorchCommunicator
from thinwire.comm.elastic import serve
from thinwire.comm.membership import Membership
from thinwire.compress.codecs import CodecName
from thinwire.optim.diloco.elastic_home import ElasticHome
from thinwire.optim.diloco.outer import WeightPair

STEPS = 120
WORKERS = 3
PAUSE = 0.002  # seconds a step, so that a random moment lies within the run
SILENCE = 2.0
LIMIT_SECONDS = 240.0
LONGEST_DELAY = 1.0
TOLERANCE = 0.01
SCATTER = {False: 0.007, True: 0.024}
"""Deviation of losses with `stat2` over seeds of data alone, where moments are not shared and where they are."""
TOO_LATE = 3
"""The exit code of a worker that finds the job over."""

# What a worker calls to take part; a victim dies on the way into one of them, or out of it.
AT_MEETINGS: dict[str, tuple[Any, str]] = {
    "meet": (Membership, "meet"),
    "decide": (Membership, "_decided"),
    "connect": (Membership, "connect"),
    "finish": (Membership, "finish"),
}
POINTS: dict[str, tuple[Any, str]] = AT_MEETINGS | {
    "leave": (ElasticHome, "_leave_next"),
    "pass on": (ElasticHome, "_pass_on"),
    "take in": (ElasticHome, "_take_in"),
    "hand over": (ElasticHome, "_hand_over"),
}
# From what a worker has done in each interval so far
GARBAGE: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "scaled": lambda done: 1e3 * done[-1],
    "flipped": lambda done: -done[-1],
    "stale": lambda done: done[max(0, len(done) - 11)],
    "not finite": lambda done: done[-1] / 0,
}
CODECS: tuple[CodecName, ...] = ("int8", "int4", "stat2")
SHARES = (False, True)
SIZES = (2, 1)
_TRAINING = ("leave", "pass on", "take in", "finish")
_MEETING = ("meet", "decide", "connect", "hand over")


@dataclass(frozen=True)
class Death:
    """Of one process: `delay` seconds after it is in the job, or at a call, the `count`th of a point from 1 up."""

    delay: float | None = None
    point: str = ""
    count: int = 1
    after: bool = False

    @classmethod
    def random(cls, source: random.Random, points: tuple[str, ...], most: int) -> Death:
        point = source.choice(points)
        count = 1 if point == "finish" else source.randint(1, most)
        return cls(None, point, count, source.random() < 0.5)


@dataclass(frozen=True)
class Trial:
    """One job of workers of `size` processes; worker w has those from w · size on. `deaths`: by process; workers beyond
    `WORKERS` join `late` seconds after the others are in. `garbage`: the worker that sends it, of which kind, and from
    which step on. `held_up`: when which process stands still for so long that the worker is dropped, if it is its
    first. `cut`: when which host's link is cut, and for how long, -1 for the meeting place's.
    `in_a_file`: whether they meet there. `pace`: seconds a step."""

    what: str
    deaths: dict[int, Death] = field(default_factory=dict)
    late: tuple[float, ...] = ()
    held_up: dict[int, float] = field(default_factory=dict)
    cut: dict[int, tuple[float, float]] = field(default_factory=dict)
    garbage: tuple[int, str, int] | None = None
    in_a_file: bool = False
    pace: float = PAUSE
    codec: CodecName = "int8"
    size: int = 1
    shares: bool = False

    @classmethod
    def random(cls, source: random.Random, codec: CodecName, size: int, shares: bool) -> Trial:
        one = cls._of_single_processes(source)
        first_rank = {worker: worker * size + source.randrange(size) for worker in range(WORKERS + 1)}
        return replace(
            one,
            deaths={first_rank[worker]: death for worker, death in one.deaths.items()},
            held_up={first_rank[worker]: delay for worker, delay in one.held_up.items()},
            codec=codec,
            size=size,
            shares=shares,
        )

    @classmethod
    def with_garbage(cls, source: random.Random, codec: CodecName, size: int, shares: bool) -> Trial:
        garbage = source.randrange(WORKERS), source.choice(list(GARBAGE)), source.randint(20, 100)
        late = (source.random() * LONGEST_DELAY,) if source.random() < 0.5 else ()
        return cls("garbage", late=late, garbage=garbage, codec=codec, size=size, shares=shares)

    @classmethod
    def _of_single_processes(cls, source: random.Random) -> Trial:
        what = source.choice(("one", "one", "two at once", "in the meeting", "joins", "a joiner dies", "held up"))
        first, second = source.sample(range(WORKERS), 2)
        delay = Death(source.random() * LONGEST_DELAY)
        death = delay if source.random() < 0.5 else Death.random(source, _TRAINING, 12)
        if what == "one":
            return cls(what, {first: death})
        if what == "held up":
            return cls(what, {}, (), {first: source.random()}, pace=0.08)
        if what == "two at once":
            return cls(what, {first: delay, second: delay})
        if what == "in the meeting":
            # The first meeting is the beginning.
            again = Death(None, source.choice(_MEETING), 2, source.random() < 0.5)
            return cls(what, {first: death, second: again})
        if what == "joins":
            return cls(what, {first: death}, (source.random() * LONGEST_DELAY,))
        joiner = Death.random(source, _MEETING, 1)
        return cls(what, {WORKERS: joiner} if source.random() < 0.5 else {WORKERS: joiner, first: death}, (0.2,))


def loss_of(model: nn.Module, seed: int, size: int = 256) -> torch.Tensor:
    """Of a target with noise, whose variance 0.25 nobody can predict."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator)
    wanted = inputs.sum(1, keepdim=True).mul(0.5).sin() + 0.5 * torch.randn(size, 1, generator=generator)
    return (model(inputs) - wanted).square().mean()


def live(number: int, address: str, trial: Trial, ledger: int) -> None:
    """What a process does."""
    worker, rank = divmod(number, trial.size)
    death = trial.deaths.get(number)
    if death is not None and death.delay is None:
        kill_self_at(death, POINTS)
    if trial.garbage is None:
        accounts.keep(ledger, worker)
    elif trial.garbage[0] == worker:
        send_garbage(*trial.garbage[1:])
    model = Tower()
    elastic = thinwire.Elastic(
        WORKERS, min_workers=1, address=address, timeout=LIMIT_SECONDS / 2, join_timeout=30.0, silence=SILENCE
    )
    try:
        comm = node_of(worker, rank, trial.size, address) if trial.size > 1 else None
        options: dict[str, Any] = {"every": 8, "fragments": 2, "codec": trial.codec, "block_size": 64}
        options["guard"] = 3.0 if trial.garbage is not None else None
        options["share"] = {"exp_avg": 1, "exp_avg_sq": 2} if trial.shares else None
        optimizer = thinwire.DiLoCo(
            model.named_parameters(), torch.optim.AdamW, lr=0.01, elastic=elastic, comm=comm, **options
        )
        os.write(ledger, f"ready {number}\n".encode())
        source = 10_000 * optimizer._home.membership.claims.claim(1)  # type: ignore[attr-defined]
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: max(0.02, 1 - optimizer.steps / STEPS))
        while optimizer.steps < STEPS:
            optimizer.zero_grad()
            loss_of(model, source + optimizer.steps).backward()
            optimizer.step()
            rates.step()
            time.sleep(trial.pace)
        optimizer.synchronize()
    except CommunicationError as error:
        os.write(ledger, f"error {number} {error}\n".encode())
        os._exit(TOO_LATE if "is over" in str(error) else 1)
    weights = optimizer._home.weights
    alike = [flat(model.parameters()), *map(weights.outer, range(len(weights.fragments)))]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in alike)).hexdigest()[:16]
    with torch.no_grad():
        loss = loss_of(model, 2**40, 8192).item()
    os.write(ledger, f"end {number} {digest} {loss} {optimizer.workers}\n".encode())


def node_of(worker: int, rank: int, size: int, address: str) -> Communicator:
    """What a torchrun of its own gives a node's ranks, at a store that none of them serves."""
    host, port = address.split(":")
    store = TCPStore(host, int(port), None, False, timedelta(seconds=30), wait_for_workers=False)
    limit = timedelta(seconds=LIMIT_SECONDS)
    dist.init_process_group("gloo", store=PrefixStore(f"{worker}", store), rank=rank, world_size=size, timeout=limit)
    return TorchCommunicator(timeout=LIMIT_SECONDS / 2)


def kill_self_at(death: Death, points: Mapping[str, tuple[Any, str]]) -> None:
    """End this process by SIGKILL before or after a call."""
    owner, name = points[death.point]
    inner, left = getattr(owner, name), [death.count]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0] and not death.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = inner(*arguments, **options)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def send_garbage(kind: str, first: int) -> None:
    """Have this process's outer gradients be garbage from a step on."""
    inner, done = ElasticHome._leave, dict[int, list[torch.Tensor]]()

    def leave(home: ElasticHome, fragment: int) -> None:
        outer, own = home.weights.outer(fragment).clone(), home.weights.replica(fragment)
        done.setdefault(fragment, []).append(own - outer)
        if home.steps >= first:
            home.weights.pairs = lambda _: [WeightPair(outer, outer + GARBAGE[kind](done[fragment]))]  # type: ignore[method-assign]
        try:
            inner(home, fragment)
        finally:
            vars(home.weights).pop("pairs", None)

    setattr(ElasticHome, "_leave", leave)  # noqa: B010


def run_trial(
    trial: Trial,
    live: Callable[[int, str, Any, int], None] = live,
    workers: int = WORKERS,
    hosts: Hosts | None = None,
) -> tuple[list[list[str]], dict[int, int]]:
    """What the ledger says, word by word, and each process's exit code; -SIGALRM for one that hung."""
    folder = tempfile.TemporaryDirectory()
    served = f"{hosts.place_address if hosts else '127.0.0.1'}:{free_port()}"
    address = f"file:{folder.name}/meeting" if trial.in_a_file else served
    reader, writer = os.pipe()

    def start(host: int, body: Callable[[], None]) -> int:
        return fork(lambda: (hosts.enter(host) if hosts else None, body())[1])

    place = start(hosts.place if hosts else -1, lambda: hold_open(served))
    processes: dict[int, int] = {}

    def begin(worker: int) -> None:
        for number in range(worker * trial.size, (worker + 1) * trial.size):
            processes[number] = start(worker, lambda number=number: live(number, address, trial, writer))  # type: ignore[misc]

    for worker in range(workers):
        begin(worker)
    lines: list[str] = []
    codes: dict[int, int] = {}
    try:
        os.set_blocking(reader, False)
        clock = Clock(reader, lines)
        everybody = workers * trial.size
        clock.wait(lambda: sum(line.startswith("ready") for line in lines) == everybody or ended(processes, codes))
        began = time.monotonic()
        due: list[tuple[float, Callable[[], None]]] = [
            (death.delay, lambda number=number: send(signal.SIGKILL, processes[number], number in codes))  # type: ignore[misc]
            for number, death in trial.deaths.items()
            if death.delay is not None
        ]
        for number, delay in trial.held_up.items():
            for later, kind in ((0.0, signal.SIGSTOP), (2.5 * SILENCE, signal.SIGCONT)):
                due.append(
                    (
                        delay + later,
                        lambda number=number, kind=kind: send(kind, processes[number], number in codes),  # type: ignore[misc]
                    )
                )
        for number, (delay, seconds) in trial.cut.items():
            assert hosts is not None
            cable = partial(hosts.plug, hosts.place if number < 0 else number)
            due += [(delay, partial(cable, False)), (delay + seconds, partial(cable, True))]
        due += [(delay, lambda worker=worker: begin(worker)) for worker, delay in enumerate(trial.late, workers)]  # type: ignore[misc]
        for delay, action in sorted(due, key=lambda one: one[0]):
            clock.wait(lambda delay=delay: time.monotonic() >= began + delay)  # type: ignore[misc]
            action()
        clock.wait(lambda: ended(processes, codes) and len(codes) == len(processes))
    finally:
        for number, process in processes.items():
            if number not in codes:
                os.kill(process, signal.SIGKILL)
                exit_code(process)
                codes[number] = -signal.SIGALRM
        os.kill(place, signal.SIGKILL)
        exit_code(place)
        os.close(reader)
        os.close(writer)
        folder.cleanup()
    return [line.split() for line in "".join(lines).splitlines()], codes


class Clock:
    """Waits, and reads the ledger meanwhile."""

    def __init__(self, reader: int, lines: list[str]) -> None:
        self._reader = reader
        self._lines = lines
        self._end = time.monotonic() + LIMIT_SECONDS

    def wait(self, until: Callable[[], bool]) -> None:
        while time.monotonic() < self._end:
            over = until()
            try:
                while data := os.read(self._reader, 1 << 16):
                    self._lines += data.decode().splitlines(keepends=True)
            except BlockingIOError:
                pass
            if over:
                return
            time.sleep(0.01)


def ended(processes: dict[int, int], codes: dict[int, int]) -> bool:
    """Note the exit codes of processes that are over; whether any is."""
    for number, process in processes.items():
        if number not in codes:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[number] = os.waitstatus_to_exitcode(status)
    return bool(codes)


def send(kind: signal.Signals, process: int, is_over: bool) -> None:
    if not is_over:
        os.kill(process, kind)


def hold_open(address: str) -> None:
    store = serve(address)
    while store is not None:
        signal.pause()


def judge(trial: Trial, usual: float) -> list[str]:
    """What is wrong with a trial's end; `usual`: the loss where nobody is disturbed."""
    lines, codes = run_trial(trial)
    ends = {int(line[1]): line[2:] for line in lines if line[0] == "end"}
    errors = {int(line[1]): " ".join(line[2:]) for line in lines if line[0] == "error"}
    killed = {number // trial.size: number % trial.size for number, code in codes.items() if code == -signal.SIGKILL}
    late = {number // trial.size for number in trial.held_up}
    bad = []
    for number, code in codes.items():
        worker, error = number // trial.size, errors.get(number, "")
        allowed = {0}
        if number in trial.deaths:
            allowed.add(-signal.SIGKILL)
        elif worker in killed and re.search(rf"\brank {killed[worker]}\b", error):
            allowed.add(1)
        if worker >= WORKERS or worker in late:
            allowed.add(TOO_LATE)
        if code not in allowed:
            hung = ", it hung" if code == -signal.SIGALRM else ""
            bad.append(f"process {number} ended with {code}{hung}: {error}")
    if len({end[0] for end in ends.values()}) != 1:
        bad.append(f"weights differ: {ends}")
    bad += accounts.faults([json.loads(line[1]) for line in lines if line[0] == "outer"])
    bad += [
        f"process {number} ended with a loss of {end[1]}, undisturbed {usual}"
        for number, end in ends.items()
        if abs(float(end[1]) / usual - 1) > (6 * SCATTER[trial.shares] if trial.codec == "stat2" else TOLERANCE)
    ]
    return [f"{trial}: {fault}" for fault in bad]


def undisturbed_loss(trial: Trial) -> float:
    lines, _ = run_trial(trial)
    losses = {float(line[3]) for line in lines if line[0] == "end"}
    assert len(losses) == 1, lines
    print(f"undisturbed, {trial}: {losses}", file=sys.stderr, flush=True)
    return losses.pop()


run = of_jobs("tests.chaos.elastic")
garbage = of_jobs("tests.chaos.elastic", "garbage")
"""Of jobs with a worker that sends garbage."""


def main(count: int, seed: int, make: Callable[[random.Random, CodecName, int, bool], Trial]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load_kernels(*CODECS)
    source = random.Random(seed)
    usual: dict[tuple[bool, CodecName, int], float] = {}
    sizes = SIZES if make == Trial.random else SIZES[::-1]  # which rank of a node sends garbage, no other node can tell
    forms = list(product(SHARES, CODECS, sizes))
    for number in range(count):
        begin = time.monotonic()
        shares, codec_name, size = form = forms[number % len(forms)]
        if form not in usual:
            usual[form] = undisturbed_loss(Trial("undisturbed", codec=codec_name, size=size, shares=shares))
        trial = make(source, codec_name, size, shares)
        bad = judge(trial, usual[form])
        judged(trial, time.monotonic() - begin, bad)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Trial.with_garbage if sys.argv[3:] else Trial.random)
