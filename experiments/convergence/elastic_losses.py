"""What deaths cost in loss: elastic 1-bit Adam trains a character model, undisturbed, and with workers that are killed
and others that join in their place, at moments that have nothing to do with steps.

    python -m experiments.convergence.elastic_losses
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from experiments.common.command_line import Parser, positive, rate
from experiments.common.errors import InputError, refuse
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import load
from experiments.tasks.next_character import CharacterModelSize, NextCharacterTask, encode
from thinwire.comm.elastic import serve
from thinwire.zero.replica import checksum

__all__ = ["main"]

_MODULE = "experiments.convergence.elastic_losses"
_SIZE = CharacterModelSize(layers=2, width=96, heads=4, length=32)
_BATCH, _MICRO_BATCH, _VALIDATED = 24, 4, 1024  # windows of a step, of a backward, and held out
_SILENCE = 8.0  # seconds after which a worker counts as dead
_SAID_EVERY = 5  # steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a line a run and writes JSON; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parse(given)
        if options.job is not None:
            _work(options)
            return 0
        check_writable(options.output.parent, "--output")
    except InputError as error:
        return refuse(_MODULE, error)
    place = serve(f"127.0.0.1:{options.port}")
    runs = []
    for seed in range(options.seeds):
        for deaths in (0, options.deaths):
            runs.append({"seed": seed, "deaths": deaths, **_run(options, list(given), seed, deaths)})
            print(runs[-1], flush=True)
        print(f"seed {seed}: {runs[-1]['loss'] / runs[-2]['loss'] - 1:+.2%}", flush=True)
    del place
    asked = {name: getattr(options, name) for name in ("workers", "steps", "deaths", "rate")}
    write_json(options.output, {"machine": describe(), **asked, "runs": runs})
    return 0


@dataclass
class _Job:
    """The processes of one run, and what they say."""

    command: list[str]
    step: int = 0
    in_the_job: set[int] = field(default_factory=set)  # by process
    ends: list[dict[str, Any]] = field(default_factory=list)
    living: list[subprocess.Popen[str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """One worker more."""
        worker = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        self.living.append(worker)
        self.readers.append(threading.Thread(target=self._read, args=(worker,)))
        self.readers[-1].start()

    def _read(self, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            said = json.loads(line)
            self.in_the_job.add(worker.pid)
            if "loss" in said:
                self.ends.append(said)
            self.step = max(self.step, said["step"])


def _run(options: argparse.Namespace, given: list[str], seed: int, deaths: int) -> dict[str, Any]:
    """Workers from first to last; their loss, which all must have, and the seconds it took."""
    job, random = (
        _Job([sys.executable, "-m", _MODULE, *given, "--job", f"{seed}-{deaths}"]),
        np.random.default_rng(seed),
    )
    began = time.monotonic()
    for _ in range(options.workers):
        job.start()
    for death in range(deaths):
        at = options.steps * (death + 1) // (deaths + 2)
        while job.step < at or not {one.pid for one in job.living} <= job.in_the_job:
            time.sleep(float(random.uniform(0.01, 0.1)))
            if job.ends or all(one.poll() is not None for one in job.living):
                raise RuntimeError(f"the run ended at step {job.step}, after {death} of {deaths} deaths")
        victim = job.living.pop(int(random.integers(len(job.living))))
        victim.kill()
        job.start()
    for one in job.living:
        one.wait()
    for reader in job.readers:
        reader.join()
    same = {json.dumps(one, sort_keys=True) for one in job.ends}
    if len(job.ends) != options.workers or len(same) != 1:
        raise RuntimeError(f"{options.workers} workers should end alike, got {job.ends}")
    return {"loss": job.ends[0]["loss"], "seconds": time.monotonic() - began}


def _work(options: argparse.Namespace) -> None:
    """One worker: says its step now and then, and its loss and the sum of its weights' bits at the end."""
    torch.set_num_threads(1)
    corpus, seed = load(options.corpus), int(options.job.split("-")[0])
    text = encode("\n".join(corpus.training), "\n".join(corpus.validation))
    task = NextCharacterTask(text, _SIZE, _MICRO_BATCH, _VALIDATED)
    model = task.build_model(seed)
    windows = torch.from_numpy(text.training[: len(text.training) // (_SIZE.length + 1) * (_SIZE.length + 1)].copy())
    data = TensorDataset(windows.view(-1, _SIZE.length + 1).long())
    job = thinwire.Elastic(
        options.workers, address=f"127.0.0.1:{options.port}", job=options.job, silence=_SILENCE, min_workers=2
    )
    optimizer = thinwire.OneBitAdam(
        model.named_parameters(), lr=options.rate, freeze_step=options.steps // 5, elastic=job
    )
    sampler = thinwire.ElasticBatchSampler(optimizer, len(data), batch=_BATCH, micro_batch=_MICRO_BATCH, seed=seed)
    for step in sampler.steps(DataLoader(data, batch_sampler=sampler)):
        done = optimizer.steps / options.steps
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, 20 * done + 0.01, 1.1 - done)
        for (batch,) in step:
            logits = model(batch[:, :-1])
            (step.weight * F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps % _SAID_EVERY == 0:
            print(json.dumps({"step": optimizer.steps}), flush=True)
        if optimizer.steps == options.steps:
            break
    optimizer.synchronize_weights()
    with torch.no_grad():
        total, count = task.validation_sum(model, 0, 1)
    bits = sum(checksum(one.detach()) for one in model.parameters())
    print(json.dumps({"step": optimizer.steps, "loss": total / count, "weights": int(bits)}), flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Compares the loss of a run whose workers die and are replaced.", "an hour")
    parser.add_argument("--workers", type=positive, default=4, metavar="N")
    parser.add_argument("--steps", type=positive, default=2000, metavar="N")
    parser.add_argument("--deaths", type=positive, default=20, metavar="N", help="and workers that join")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N")
    parser.add_argument("--rate", type=rate, default=5e-3, help="peak learning rate")
    parser.add_argument("--corpus", nargs="+", type=Path, help="text files; default: Python's standard library")
    parser.add_argument("--port", type=positive, default=29_441, metavar="N", help="of the meeting place")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # a worker's
    parser.add_argument("--output", type=Path, default=OUTPUT / "elastic_losses.json", metavar="FILE.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
