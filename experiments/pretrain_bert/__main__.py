"""Pretrains BERT on real text, on several ranks, with AdamW and with 1-bit Adam, and draws both.

Starts its ranks by itself (`python -m experiments.pretrain_bert --ranks 4`), or runs unchanged under a
launcher (`mpirun -n 4 python -m experiments.pretrain_bert`; torchrun and srun likewise).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from experiments.common import machine
from experiments.common.errors import InputError, on_every_rank
from experiments.common.launching import launch
from experiments.common.results import write_json
from experiments.pretrain_bert.engine_settings import load
from experiments.pretrain_bert.plots import draw
from experiments.pretrain_bert.settings import DEFAULT_RANKS, PretrainSettings, parse
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import Tokens, share_tokens, unigram_entropy
from experiments.training import findings
from experiments.training.checkpoints import RunCheckpoints
from experiments.training.learners import EngineLearner
from experiments.training.optimizers import OPTIMIZERS, PARENTS
from experiments.training.reporting import human_bytes, reporter
from experiments.training.trainer import Outcome, StepReport, Trainer
from thinwire.comm import Communicator
from thinwire.engine import NonFiniteError

if TYPE_CHECKING:
    from experiments.tasks.language import MaskedLanguageTask

__all__ = ["main", "pretrain"]

_NAME = "pretrain_bert"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.pretrain_bert", parse, pretrain, given, DEFAULT_RANKS)


def pretrain(comm: Communicator, settings: PretrainSettings) -> None:
    """Trains with each optimizer in turn, on the same data from the same weights, and writes the results.

    Raises:
        InputError: on every rank, for a corpus or a checkpoint that cannot be used.
    """
    # Importing transformers takes seconds, which the process that only starts the ranks is spared.
    from experiments.tasks.language import MaskedLanguageTask

    tokens = share_tokens(
        comm,
        settings.read_corpus,
        settings.vocab_size,
        settings.sequence_length,
        settings.validation_sequences,
    )
    first = on_every_rank(comm, lambda: load(settings.engine.config(settings.engine.optimizers[0]), comm.size))
    batch_size = first.train_batch_size
    task = MaskedLanguageTask(
        tokens,
        SIZES[settings.model],
        first.train_micro_batch_size_per_gpu,
        settings.dropout,
        pre_ln=settings.pre_ln,
    )
    runs = {name: _train(name, task, batch_size, settings, comm) for name in settings.engine.optimizers}
    on_every_rank(comm, lambda: _write_results(runs, tokens, batch_size, settings, comm))


def _train(
    optimizer: str, task: MaskedLanguageTask, batch_size: int, settings: PretrainSettings, comm: Communicator
) -> Outcome:
    """One run, taken up from its last checkpoint if asked."""
    label = OPTIMIZERS[optimizer].label
    plan = settings.plan
    learner = EngineLearner(task.build_model(plan.seed), plan, settings.engine.config(optimizer), comm)
    trainer = Trainer(task, plan, learner, comm)
    checkpoints = RunCheckpoints(settings.checkpoints / _NAME / optimizer, comm, settings.describe(batch_size))
    if not settings.resume:
        checkpoints.clear()
    elif checkpoints.load(trainer, learner) and comm.rank == 0:
        print(f"{label}: continuing after step {trainer.step}", file=sys.stderr)
    with reporter(
        label,
        first_step=trainer.step,
        steps=plan.steps,
        items_a_step=batch_size * settings.sequence_length,
        unit="tokens",
        every=settings.print_every,
        rank=comm.rank,
    ) as progress:
        while not trainer.finished:
            progress.update(_advance(trainer))
            if trainer.finished or trainer.step % settings.checkpoint_every == 0:
                checkpoints.save(trainer, learner)
    learner.engine.close()
    return trainer.outcome


def _advance(trainer: Trainer) -> StepReport:
    try:
        return trainer.advance()
    except NonFiniteError as error:
        raise InputError(f"training broke down at {error}") from error


def _write_results(
    runs: dict[str, Outcome], tokens: Tokens, batch_size: int, settings: PretrainSettings, comm: Communicator
) -> None:
    """JSON, picture and a summary, on rank 0: the one that has the tokenizer."""
    if tokens.tokenizer is None:
        return
    tokens.tokenizer.save(str(settings.checkpoints / _NAME / "tokenizer.json"))
    found = {
        name: findings.compare([runs[PARENTS[name]]], [run])
        for name, run in runs.items()
        if PARENTS.get(name) in runs and comm.size > 1
    }
    tokens_trained = settings.plan.steps * batch_size * settings.sequence_length
    content = {
        "settings": settings.describe(batch_size),
        "ranks": comm.size,
        "backend": comm.backend,
        "machine": machine.describe(),
        "corpus_tokens": tokens.training.size,
        "unigram_entropy": unigram_entropy(tokens),
        "findings": {name: asdict(finding) for name, finding in found.items()},
        "tokens_per_second": {name: round(tokens_trained / run.seconds) for name, run in runs.items()},
        "runs": {name: asdict(run) for name, run in runs.items()},
    }
    write_json(settings.output / f"{_NAME}.json", content)
    draw(content, settings.output / f"{_NAME}.png")
    for name, run in runs.items():
        sent = human_bytes(run.bytes_sent)
        print(f"{OPTIMIZERS[name].label}: validation loss {run.final_loss:.4f}, {sent} sent by each rank")
    for name, finding in found.items():
        print(f"{OPTIMIZERS[name].label}: {finding.claim}")
    print(f"Written: {settings.output / _NAME}.json and .png", flush=True)


if __name__ == "__main__":
    sys.exit(main())
