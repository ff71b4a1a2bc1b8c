"""Does 1-bit Adam learn as well as AdamW? Both on text and on digits, over several seeds, drawn with bands.

Starts its ranks by itself (`python -m experiments.convergence`), or runs unchanged under a launcher.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments import findings, machine, plotting
from experiments.command_line import Parser, positive
from experiments.corpus import load
from experiments.digits import DigitsTask
from experiments.errors import on_every_rank
from experiments.language import MaskedLanguageTask, share_tokens, unigram_entropy
from experiments.launching import launch
from experiments.plotting import LABELS
from experiments.reporting import reporter
from experiments.results import RESULTS, check_writable, write_json
from experiments.sizes import SIZES
from experiments.training import OPTIMIZERS, Outcome, Plan, Task, Trainer
from thinwire.comm import Communicator

__all__ = ["main", "study"]

_NAME = "convergence"
_DEFAULT_RANKS = 4
_LEARNING_RATES = (1e-3, 2e-3, 3e-3)
"""Tried for AdamW by --tune; the plans below have the best one, for both optimizers."""

_TEXT_PLAN = Plan(
    steps=3000,
    warmup_steps=300,
    learning_rate=2e-3,
    weight_decay=0.01,
    freeze_step="auto",
    evaluate_every=100,
    seed=0,
)
_DIGITS_PLAN = replace(_TEXT_PLAN, steps=600, warmup_steps=60, evaluate_every=20)


@dataclass(frozen=True)
class Subject:
    """A task with its plan and what the picture says about it."""

    task: Task
    plan: Plan
    batch_size: int
    description: str
    loss_name: str
    reference: plotting.Reference | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.convergence", _parse, study, given, _DEFAULT_RANKS)


def study(comm: Communicator, options: argparse.Namespace) -> None:
    """Trains every task with every optimizer and seed, and writes the numbers and the picture.

    Raises:
        InputError: on every rank, for a corpus that cannot be used.
    """
    subjects = {name: _SUBJECTS[name](comm, options) for name in options.tasks}
    if options.tune:
        rates = {name: _tune(name, subject, comm) for name, subject in subjects.items()}
        on_every_rank(comm, lambda: _write(options.output, f"{_NAME}_tuning", {"final_losses": rates}, comm))
        return
    runs = {name: _run_all(name, subject, options.seeds, comm) for name, subject in subjects.items()}
    on_every_rank(comm, lambda: _write_results(subjects, runs, options.output, comm))


def _text(comm: Communicator, options: argparse.Namespace) -> Subject:
    """BERT-tiny restores masked tokens."""
    batch_size, length = 8, 32
    tokens = share_tokens(comm, lambda: load(options.corpus), 4096, length, 1024)
    text = ", ".join(path.name for path in options.corpus) if options.corpus else "Python's standard library"
    return Subject(
        MaskedLanguageTask(tokens, SIZES["tiny"], batch_size, dropout=0.0),
        replace(_TEXT_PLAN, steps=options.text_steps or _TEXT_PLAN.steps),
        batch_size * length,
        f"BERT-tiny, {text}",
        "validation loss (nats a masked token)",
        plotting.Reference(unigram_entropy(tokens), "guessing by token frequency"),
    )
