"""Optimizers whose workers are killed by SIGKILL in any part of a step, two at once, in a meeting, while another
joins, or held up, and die while joining; or whose link, or the meeting place's, is cut for a while, as root on Linux:
those that are left end with the bits of a run, on threads, whose workers left and came at the same steps, and every
sample counts once an epoch.

``python -m tests.chaos.heal 50 7`` runs 50 jobs from seed 7. Optimizers, and jobs of 4 and 6 workers, take turns.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from experiments.ethernet.cluster.commands import missing
from tests.chaos.elastic import (
    AT_MEETINGS,
    LIMIT_SECONDS,
    LONGEST_DELAY,
    SILENCE,
    TOO_LATE,
    Death,
    Trial,
    kill_self_at,
    run_trial,
)
from tests.chaos.harness import digest, judged, of_jobs
from tests.chaos.hosts import Hosts, emulated_hosts
from tests.chaos.kills import load_kernels
from tests.engine.checkpoint.kill import exit_code, fork
from tests.optim.diloco.tower import Tower, together
from thinwire.comm import CommunicationError, communicator, elastic
from thinwire.comm.decisions import Decisions
from thinwire.comm.relay import GenerationCommunicator
from thinwire.optim import elastic_job
from thinwire.optim.replicated.elastic_shards import ShardedWorkers
from thinwire.optim.replicated.elastic_workers import ElasticWorkers
from thinwire.optim.replicated.joining import Telling

STEPS = 60
SIZE, BATCH, MICRO_BATCH = 240, 48, 4
PACE = 0.01
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (thinwire.OneBitAdam, {"freeze_step": 20, "max_norm": 1.0}),
    "adam after int4": (thinwire.OneBitAdam, {"freeze_step": 20, "warmup_wire": "int4", "codec": "stat2"}),
    "lamb": (thinwire.OneBitLamb, {"freeze_step": 20}),
    "lion": (thinwire.OneBitLion, {}),
    "zero-one adam": (thinwire.ZeroOneAdam, {"var_freeze_step": 20, "local_step_scaler": 8, "local_step_clipper": 4}),
    "adamw": (
        thinwire.ShardedOptimizer,
        {"optimizer_class": torch.optim.AdamW, "stage": 0, "codec": "int4", "max_norm": 1.0},
    ),
    "adamw at stage 1": (
        thinwire.ShardedOptimizer,
        {"optimizer_class": torch.optim.AdamW, "stage": 1, "max_norm": 1.0},
    ),
    "muon": (thinwire.ShardedOptimizer, {"optimizer_class": thinwire.optim.Muon, "stage": 0}),
    "1-bit muon": (thinwire.OneBitMuon, {"max_norm": 1.0, "bucket_bytes": 300, "adam_lr": 0.003}),
}
DIVIDED = ("adamw at stage 1", "1-bit muon")
POINTS: dict[str, tuple[Any, str]] = AT_MEETINGS | {
    "leg 1": (GenerationCommunicator, "all_to_all"),
    "leg 2": (GenerationCommunicator, "all_gather"),
    "arrival": (ElasticWorkers, "_take"),
    "decision": (Decisions, "_decide"),
    "move": (ElasticWorkers, "_move"),
    "join": (ElasticWorkers, "_join"),
    "share": (ElasticWorkers, "_share_step"),
    "tell": (Telling, "begin"),
    "follow": (ElasticWorkers, "_follow"),
    "hand over": (ElasticWorkers, "_hand_over"),
    "new weights": (ShardedWorkers, "_gather"),
    "dividing": (ShardedWorkers, "_move_state"),
    "moving": (ShardedWorkers, "_move_between"),
}
_LOST = "optimizer state is lost"
_TRAINING = ("leg 1", "leg 2", "arrival", "decision", "tell", "finish")
_MEETING = ("meet", "decide", "connect", "join", "share", "follow", "hand over", "move")


@dataclass(frozen=True)
class Job(Trial):
    """A trial of `workers` with the optimizer `kind`."""

    kind: str = "adam"
    workers: int = 4

    @classmethod
    def of(cls, source: random.Random, kind: str, workers: int, has_links: bool) -> Job:
        what = source.choice(
            (
                *("one", "one", "two at once", "in the meeting", "joins", "joins, and one dies", "a joiner dies"),
                *("held up", "cut", "meeting place cut"),
            )
        )
        what = what if has_links or "cut" not in what else "one"
        first, second = source.sample(range(workers), 2)
        delay = Death(source.random() * LONGEST_DELAY)
        divides = kind in DIVIDED
        training = (*_TRAINING, "new weights", "new weights") if "stage 1" in kind else _TRAINING
        meeting = (*_MEETING, "dividing", "moving", "moving") if divides else _MEETING
        death = delay if source.random() < 0.3 else Death.random(source, training, 60)
        point = source.choice(meeting)
        again = Death(None, point, 1 if point == "moving" else 2, source.random() < 0.5)
        joiner = Death.random(source, meeting, 1)
        late = (source.random() * LONGEST_DELAY,)
        deaths, comes = {
            "one": ({first: death}, ()),
            "two at once": ({first: delay, second: delay if source.random() < 0.5 else death}, ()),
            "in the meeting": ({first: death, second: again}, ()),
            "joins": ({}, late),
            "joins, and one dies": ({first: death}, late),
            "a joiner dies": ({workers: joiner, first: death}, (0.2, 0.4)),
            "held up": ({}, ()),
            "cut": ({}, ()),
            "meeting place cut": ({}, ()),
        }[what]
        held_up = {first: source.random()} if what == "held up" else {}
        lasts = source.random(), 0.3 + source.random() * 3 * SILENCE
        cut = {first if what == "cut" else -1: lasts} if "cut" in what else {}
        pace = 0.1 if held_up or cut else PACE
        in_a_file = not cut and source.random() < 0.3
        return cls(what, deaths, comes, held_up, cut, None, in_a_file, pace, kind=kind, workers=workers)  # type: ignore[arg-type]


def make(kind: str, model: Tower, settings: thinwire.Elastic, **others: Any) -> Any:
    made, options = KINDS[kind]
    return made(model.named_parameters(), **{"lr": 0.01, "block_size": 64, "elastic": settings} | options | others)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SIZE, 5, generator=generator)
    return TensorDataset(torch.arange(SIZE), inputs, inputs.sum(1, keepdim=True).mul(0.5).sin())


def train(model: Tower, optimizer: Any, on_step: Any, begin: Any, before_backward: Any, pace: float) -> None:
    """To the end; `on_step` hears of the dealing, `begin` of a step, `before_backward` of its samples so far."""
    workers: ElasticWorkers = optimizer._home.workers
    sampler = thinwire.ElasticBatchSampler(optimizer, SIZE, batch=BATCH, micro_batch=MICRO_BATCH)
    deal = workers.on_step

    def note(dealt_to: list[str], took_part: list[str] | None) -> None:
        on_step(optimizer.steps, dealt_to, took_part)
        deal(dealt_to, took_part)

    workers.on_step = note
    for step in sampler.steps(DataLoader(data(), batch_sampler=sampler)):
        if optimizer.steps >= STEPS:  # who has joined after the last one
            break
        samples: list[int] = []
        begin(optimizer.steps)
        for numbers, inputs, wanted in step:
            samples += numbers.tolist()
            before_backward(optimizer.steps, samples)
            (step.weight * (model(inputs) - wanted).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pace)
        if optimizer.steps >= STEPS:
            break
    optimizer.synchronize_weights()


def live(number: int, address: str, job: Job, ledger: int) -> None:
    """A worker's process."""
    death = job.deaths.get(number)
    if death is not None and death.delay is None:
        kill_self_at(death, POINTS)
    model = Tower()
    settings = thinwire.Elastic(
        job.workers, address=address, timeout=LIMIT_SECONDS / 2, join_timeout=30.0, silence=SILENCE
    )

    def write(*words: object) -> None:
        os.write(ledger, (" ".join(map(str, words)) + "\n").encode())

    try:
        optimizer = make(job.kind, model, settings)
        name = optimizer._home.workers.membership.name
        write("ready", number, name)
        train(
            model,
            optimizer,
            lambda step, dealt, took: write("step", number, step, ",".join(dealt), ",".join(took or ["-"])),
            lambda step: None,
            lambda step, samples: write("read", name, step, ",".join(map(str, samples))),
            job.pace,
        )
    except CommunicationError as error:
        write("error", number, error)
        late = any(words in str(error) for words in ("is over", "took this one for dead", "does not answer"))
        os._exit(TOO_LATE if late else 1)
    write("end", number, digest(model))


def judge(job: Job, hosts: Hosts | None = None) -> list[str]:
    """What is wrong with a job's end."""
    lines, codes = run_trial(job, live, job.workers, hosts if job.cut else None)
    errors = {int(line[1]): " ".join(line[2:]) for line in lines if line[0] == "error"}
    bad = []
    lost = {number for number, told in errors.items() if _LOST in told}
    if lost and codes.keys() - lost == {number for number, code in codes.items() if code == -9} == job.deaths.keys():
        return [] if len(job.deaths) > 1 else [f"{job}: one death has cost state: {errors}"]
    for number, code in codes.items():
        allowed = {0, -9} if number in job.deaths else {0}
        allowed |= {TOO_LATE} if number >= job.workers or number in (*job.held_up, *job.cut) else set()
        if code not in allowed:
            bad.append(f"process {number} ended with {code}: {errors.get(number, '')}")
    ends = {int(line[1]): line[2] for line in lines if line[0] == "end"}
    dealt: dict[int, tuple[list[str], list[str] | None]] = {}
    for line in lines:
        if line[0] == "step" and int(line[1]) in ends:  # who is gone may have had a step that others sent again
            told = line[3].split(","), None if line[4] == "-" else line[4].split(",")
            if dealt.setdefault(int(line[2]), told) != told:
                bad.append(f"step {line[2]}: {told} and {dealt[int(line[2])]}")
    if len(set(ends.values())) != 1:
        return [f"{job}: {one}" for one in [*bad, f"weights differ: {ends}"]]
    read = {(line[1], int(line[2])): list(map(int, line[3].split(","))) for line in lines if line[0] == "read"}
    bad += miscounted(dealt, read)
    replayed = in_a_fork(lambda: replay(job.kind, dealt))
    if replayed not in ends.values() and (replayed != _LOST or job.kind != "1-bit muon" or len(job.deaths) < 2):
        bad.append(f"weights {ends}, of workers that leave and come as these did {replayed}")
    return [f"{job}: {one}" for one in bad]


def miscounted(
    dealt: dict[int, tuple[list[str], list[str] | None]], read: dict[tuple[str, int], list[int]]
) -> list[str]:
    """What is wrong with how often samples counted."""
    counted, pending = Counter[int](range(SIZE)), list[int]()
    for step, (_, took_part) in sorted(dealt.items()):
        pending.append(step)
        if took_part is not None:
            counted.update(sample for name in took_part for one in pending for sample in read[name, one])
            pending = []
    few, many = min(counted.values()), max(counted.values())
    return [] if many - few <= 1 else [f"some samples counted {few - 1} times, some {many - 1}"]


def replay(kind: str, dealt: dict[int, tuple[list[str], list[str] | None]]) -> str:
    """How workers on threads end that leave and come at the steps at which those of a job did. Where they can they
    divide no state, which is lost if two leave between the same two steps, and not if one dies once the other's has
    moved."""
    elastic._INTERVAL, communicator._ALARM_INTERVAL = 0.02, 0.02
    store = HashStore()
    elastic_job.reach = lambda settings: (store, "here")
    ElasticWorkers._look_on = lambda workers: None  # type: ignore[method-assign]
    first = dealt[min(dealt)][0]
    settings = thinwire.Elastic(len(first), address="here:1", timeout=60.0, join_timeout=60.0, silence=20.0)
    # Who was dealt data, and got no state before it was sent again, comes anew.
    stay = {step + 1: dealt_to if took_part is None else took_part for step, (dealt_to, took_part) in dealt.items()}
    comes = {step: [one for one in dealt[step][0] if one not in stay[step]] for step in dealt if step}
    begins = {step: threading.Event() for step in comes}

    def waiting(generation: int) -> int:
        """How many have written that they wait, not only counted themselves: a meeting takes no others."""
        return next(place for place in count() if not store.check([f"thinwire/job/{generation}/entry/{place}"]))

    def body(name: str, step: int, place: int) -> str | None:
        if step:
            assert begins[step].wait(60)
        generation = int(store.get("thinwire/job/latest")) + 1 if step else 1
        while waiting(generation) < place:
            time.sleep(0.005)
        model = Tower()
        optimizer = make(kind, model, settings, **({"stage": 0} if "stage 1" in kind else {}))

        end_step, goes = optimizer._home.workers.end_step, list[int]()

        def on_step(at: int, _: list[str], took_part: list[str] | None) -> None:
            if took_part is not None and name not in dealt.get(at + 1, ([name], None))[0]:
                goes.append(at)  # between this step and the next

        def end_or_go() -> None:
            if goes:
                raise SystemExit
            end_step()

        optimizer._home.workers.end_step = end_or_go

        def begin(at: int) -> None:
            took_part = dealt[at][1]
            if took_part is not None and name not in took_part:
                raise SystemExit
            if comes.get(at + 1):
                number = optimizer._home.workers.membership.generation.number + 1
                begins[at + 1].set()
                while waiting(number) < len(comes[at + 1]) or not optimizer._home.workers.membership.wanted:
                    time.sleep(0.005)
                optimizer._home.workers._move()  # so that the step's packets say it

        try:
            train(model, optimizer, on_step, begin, lambda at, samples: None, 0.0)
        except SystemExit:
            optimizer.close()
            return None
        return digest(model)

    roles = [(name, 0, place) for place, name in enumerate(first)]
    roles += [(name, step, place) for step, names in comes.items() for place, name in enumerate(names)]
    try:
        ends = together([lambda role=role: body(*role) for role in roles])
    except CommunicationError as error:
        if _LOST not in str(error):
            raise
        return _LOST
    (end,) = {one for one in ends if one is not None}
    return end


def in_a_fork(call: Any) -> str:
    reader, writer = os.pipe()
    process = fork(lambda: os.write(writer, call().encode()))
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    exit_code(process)
    return text


run = of_jobs("tests.chaos.heal")


def main(count: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load_kernels("sign1", "stat2", "int4")
    source, has_links = random.Random(seed), missing() is None
    forms = list(product(KINDS, (4, 6)))
    jobs = [Job.of(source, *forms[number % len(forms)], has_links) for number in range(count)]
    with emulated_hosts(7) if any(job.cut for job in jobs) else nullcontext() as hosts:
        for job in jobs:
            begin = time.monotonic()
            bad = judge(job, hosts)
            judged(job, time.monotonic() - begin, bad)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
