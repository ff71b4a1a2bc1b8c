"""Trains a list of runs that differ in ZeRO stage, precision or ranks, and writes every loss: what `experiments.stages`
starts on one number of ranks after another."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.common.command_line import Parser
from experiments.common.errors import InputError, on_every_rank
from experiments.common.launching import launch
from experiments.common.results import read_json, write_json
from experiments.tasks.corpus import load
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import share_tokens, unigram_entropy
from experiments.training.learners import EngineLearner, Learner, LoopLearner
from experiments.training.optimizers import engine_section
from experiments.training.plans import Plan
from experiments.training.reporting import reporter
from experiments.training.trainer import Trainer
from thinwire.comm import Communicator

__all__ = ["Job", "Losses", "Run", "main", "train_all"]

_LENGTH, _VALIDATION_SEQUENCES = 32, 256
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its results.
        optimizer: a name in `OPTIMIZERS`.
        stage: of ZeRO in the engine; None for thinwire.OneBitAdam in a plain loop, nothing sharded.
        bf16: bf16 weights with fp32 master weights instead of fp32.
        seed: of weights and batches.
        save: a folder to save a checkpoint to after step `save_at`.
        load: a folder to go on from, instead of starting.
    """

    name: str
    optimizer: str
    stage: int | None
    bf16: bool = False
    seed: int = 0
    save: str | None = None
    save_at: int = 0
    load: str | None = None


@dataclass(frozen=True)
class Job:
    """Runs that share all the rest; `batch` counts sequences a step over all ranks."""

    model: str
    vocabulary: int
    batch: int
    steps: int
    warmup_steps: int
    learning_rate: float
    freeze_step: int
    evaluate_every: int
    corpus: list[str] | None
    runs: list[Run]

    @classmethod
    def read(cls, path: Path) -> Job:
        """From the JSON of `asdict`."""
        content = read_json(path)
        return cls(**content | {"runs": [Run(**run) for run in content["runs"]]})

    def plan(self, seed: int) -> Plan:
        """The plan of a run."""
        return Plan(
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            learning_rate=self.learning_rate,
            weight_decay=_WEIGHT_DECAY,
            freeze_step=self.freeze_step,
            evaluate_every=self.evaluate_every,
            seed=seed,
        )


@dataclass(frozen=True)
class Losses:
    """What a run gave: training losses, over the whole batch, of the steps after `first_step`, and validation losses
    after `validation_steps`; in nats a masked token."""

    first_step: int
    training: list[float]
    validation_steps: list[int]
    validation: list[float]
    bytes_sent: int
    frozen_at: int | None
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.stages.losses", parse, train_all, given, 1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser("experiments.stages.losses", "Trains the runs of a job that experiments.stages writes.")
    parser.add_argument("--job", type=Path, required=True, metavar="FILE.json", help="a Job")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="Losses by run")
    parser.add_argument("--ranks", type=int, metavar="N", help="else the launcher's")
    return parser.parse_args(arguments)


def train_all(comm: Communicator, options: argparse.Namespace) -> None:
    """Trains the runs one after another, and writes their losses on rank 0. Collective."""
    from experiments.tasks.language import GlobalBatchTask

    job = on_every_rank(comm, lambda: Job.read(options.job))
    if job.batch % comm.size:
        raise InputError(f"a batch of {job.batch} sequences cannot be shared among {comm.size} ranks alike")
    corpus = [Path(file) for file in job.corpus] if job.corpus else None
    tokens = share_tokens(comm, lambda: load(corpus), job.vocabulary, _LENGTH, _VALIDATION_SEQUENCES)
    task = GlobalBatchTask(tokens, SIZES[job.model], job.batch)
    losses = {run.name: asdict(_train(run, job, task, comm)) for run in job.runs}
    if comm.rank == 0:
        write_json(options.output, {"unigram_entropy": unigram_entropy(tokens), "losses": losses})


def _train(run: Run, job: Job, task: Any, comm: Communicator) -> Losses:
    plan = job.plan(run.seed)
    learner = _learner(run, job, task, plan, comm)
    trainer = Trainer(task, plan, learner, comm)
    if run.load is not None:
        assert isinstance(learner, EngineLearner)
        _, state = learner.engine.load_checkpoint(run.load)
        trainer.restore_progress(state)
    first_step = trainer.step
    training = []
    title = f"{run.name}, {comm.size} ranks"
    every = max(1, job.steps // 4)
    with reporter(
        title,
        first_step=first_step,
        steps=plan.steps,
        items_a_step=job.batch * _LENGTH,
        unit="tokens",
        every=every,
        rank=comm.rank,
    ) as progress:
        while not trainer.finished:
            report = trainer.advance()
            loss = torch.tensor([report.loss], dtype=torch.float64)
            comm.all_reduce(loss, "mean")
            training.append(loss.item())
            progress.update(report)
            if run.save is not None and trainer.step == run.save_at:
                assert isinstance(learner, EngineLearner)
                learner.engine.save_checkpoint(run.save, client_state=trainer.progress())
    if isinstance(learner, EngineLearner):
        learner.engine.close()
    curve = trainer.curve
    return Losses(
        first_step=first_step,
        training=training,
        validation_steps=curve.steps,
        validation=curve.losses,
        bytes_sent=trainer.bytes_sent,
        frozen_at=learner.frozen_at,
        seconds=round(trainer.seconds, 1),
    )


def _learner(run: Run, job: Job, task: Any, plan: Plan, comm: Communicator) -> Learner:
    model = task.build_model(run.seed)
    if run.stage is None:
        return LoopLearner(model, plan, run.optimizer, comm)
    config = {
        "train_batch_size": job.batch,
        "optimizer": engine_section(run.optimizer, job.learning_rate, job.freeze_step),
        "zero_optimization": {"stage": run.stage},
        "bf16": {"enabled": run.bf16},
    }
    return EngineLearner(model, plan, config, comm)


if __name__ == "__main__":
    sys.exit(main())
