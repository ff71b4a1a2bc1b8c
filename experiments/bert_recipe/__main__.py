"""Pretrains BERT by the recipe of the fastest published run, scaled to the machine: large batches through accumulation,
LAMB and 1-bit LAMB, short sequences and then long ones; and says how long the published run would take here.

    python -m experiments.bert_recipe
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from experiments.bert_recipe.plots import draw
from experiments.bert_recipe.published import PHASES, PUBLISHED, published_days
from experiments.common.command_line import Parser, freeze_step, positive, rate, seed
from experiments.common.errors import on_every_rank
from experiments.common.launching import launch
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import Tokens, share_tokens, unigram_entropy
from experiments.training.learners import EngineLearner
from experiments.training.optimizers import OPTIMIZERS, engine_section
from experiments.training.plans import Plan
from experiments.training.reporting import human_bytes, train_to_end
from experiments.training.trainer import Curve, Outcome, Trainer
from thinwire.comm import Communicator

if TYPE_CHECKING:
    from experiments.tasks.language import MaskedLanguageTask

__all__ = ["main", "parse", "pretrain"]

_MODULE = "experiments.bert_recipe"
_COMPARED = ("lamb", "onebit-lamb")
_VALIDATED = 256  # held-out sequences of 128 tokens; a quarter as many of 512
_AS_PUBLISHED = {"weight_decay": 0.01, "bias_correction": False}
_TIMED = 2  # micro-batches of BERT-large
_LARGE_VOCABULARY = 30522


@dataclass(frozen=True)
class _Settings:
    ranks: int | None
    corpus: tuple[Path, ...] | None
    model: str
    vocab_size: int
    batch_size: int
    steps: int
    learning_rate: float
    freeze_step: int | None
    seed: int
    large: bool
    output: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains on the ranks asked for, writes the JSON and draws it; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_MODULE, parse, pretrain, given, default_ranks=2)


def pretrain(comm: Communicator, settings: _Settings) -> None:
    """Trains with each optimizer in turn, and writes the results. Collective."""
    phases = [_tokens(comm, settings, phase.length) for phase in PHASES]
    runs = {name: _pretrain(comm, settings, phases, name) for name in _COMPARED}
    rates = _large_rates(comm) if settings.large else None
    on_every_rank(comm, lambda: None if comm.rank else _write(comm, settings, phases, runs, rates))


def _tokens(comm: Communicator, settings: _Settings, length: int) -> Tokens:
    held_out = max(1, _VALIDATED * PHASES[0].length // length)
    return share_tokens(comm, lambda: load(settings.corpus), settings.vocab_size, length, held_out)


def _pretrain(comm: Communicator, settings: _Settings, phases: Sequence[Tokens], optimizer: str) -> Outcome:
    """Both phases with one model; the second with a new optimizer, whose rate rises again."""
    from experiments.tasks.models import build_bert

    longest = PHASES[-1].length
    model = build_bert(SIZES[settings.model], phases[0].vocabulary, longest, 0.0, settings.seed)
    found: list[Outcome] = []
    for tokens, phase in zip(phases, PHASES, strict=True):
        steps, batch = max(2, round(settings.steps * phase.steps)), max(1, round(settings.batch_size * phase.batch))
        plan = Plan(
            steps,
            warmup_steps=max(1, steps // 10),
            learning_rate=settings.learning_rate * phase.rate,
            weight_decay=0.01,
            freeze_step=settings.freeze_step or max(1, steps // 5),
            evaluate_every=max(1, steps // 20),
            seed=settings.seed,
            power=0.5,
        )
        micro = phase.micro_batch
        config = {
            "optimizer": engine_section(optimizer, plan.learning_rate, plan.freeze_step, **_AS_PUBLISHED),
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": max(1, batch // (micro * comm.size)),
            "zero_optimization": {"stage": 1},
        }
        learner = EngineLearner(model, plan, config, comm)
        trainer = Trainer(_task(tokens, settings, micro), plan, learner, comm)
        title = f"{OPTIMIZERS[optimizer].label}, {phase.length} tokens"
        found.append(train_to_end(trainer, title, items_a_step=learner.engine.train_batch_size(), unit="sequences"))
        learner.engine.close()
    return _joined(*found)


def _task(tokens: Tokens, settings: _Settings, micro_batch: int) -> MaskedLanguageTask:
    from experiments.tasks.language import MaskedLanguageTask

    return MaskedLanguageTask(tokens, SIZES[settings.model], micro_batch, dropout=0.0)


def _joined(first: Outcome, second: Outcome) -> Outcome:
    """One run out of both phases: steps and bytes go on where the first ended."""
    steps = first.curve.steps[-1]
    curve = Curve(
        first.curve.steps + [steps + one for one in second.curve.steps],
        first.curve.bytes_sent + [first.bytes_sent + one for one in second.curve.bytes_sent],
        first.curve.losses + second.curve.losses,
    )
    seconds, sent = first.seconds + second.seconds, first.bytes_sent + second.bytes_sent
    return replace(second, curve=curve, seconds=seconds, bytes_sent=sent, frozen_at=first.frozen_at)


def _large_rates(comm: Communicator) -> list[float]:
    """Sequences a second of BERT-large on all ranks together, of each phase's length; collective. An optimizer's step
    is not in it: a batch of tens of thousands has one."""
    from experiments.tasks.masking import mask_tokens
    from experiments.tasks.models import build_bert

    model = build_bert(SIZES["large"], _LARGE_VOCABULARY, PHASES[-1].length, 0.0, 0)
    rates = []
    for phase in PHASES:
        count = max(1, 512 // phase.length)
        drawn = torch.randint(5, _LARGE_VOCABULARY, (count, phase.length), generator=torch.Generator().manual_seed(0))
        inputs, labels = map(torch.from_numpy, mask_tokens(drawn.numpy(), _LARGE_VOCABULARY, np.random.default_rng(0)))
        seconds = []
        for _ in range(1 + _TIMED):
            comm.barrier()
            started = time.perf_counter()
            total, chosen = model(inputs, labels)
            (total / max(1, chosen)).backward()
            seconds.append(time.perf_counter() - started)
        rate = torch.tensor(count * _TIMED / sum(seconds[1:]), dtype=torch.float64)
        comm.all_reduce(rate)
        rates.append(float(rate))
    return rates


def _write(
    comm: Communicator,
    settings: _Settings,
    phases: Sequence[Tokens],
    runs: dict[str, Outcome],
    rates: list[float] | None,
) -> None:
    content: dict[str, Any] = {
        "settings": {
            **{name: value for name, value in asdict(settings).items() if name not in ("output", "ranks", "corpus")},
            "corpus": corpus_name(settings.corpus),
        },
        "phases": [asdict(phase) for phase in PHASES],
        "ranks": comm.size,
        "machine": describe(),
        "unigram_entropy": unigram_entropy(phases[0]),
        "runs": {name: asdict(run) for name, run in runs.items()},
    }
    for name, run in runs.items():
        sent = human_bytes(run.bytes_sent)
        print(f"{OPTIMIZERS[name].label}: validation loss {run.final_loss:.4f}, {sent} sent by each rank")
    if rates is not None:
        days = published_days(rates)
        content["bert_large"] = {"sequences_a_second": rates, "days_of_the_published_run": days}
        per_second = ", ".join(
            f"{rate:.2f} sequences of {phase.length} tokens a second, a V100 {phase.v100_rate}"
            for rate, phase in zip(rates, PHASES, strict=True)
        )
        took = ", ".join(f"{count} V100 {hours:.2f} hours" for count, hours in PUBLISHED.items())
        print(f"BERT-large here, forward and backward: {per_second}")
        print(f"The published run's sequences would take this machine {days:,.0f} days; by DeepSpeed's table, {took}")
    write_json(settings.output / "bert_recipe.json", content)
    draw(content, settings.output / "bert_recipe.png")


def parse(arguments: Sequence[str]) -> _Settings:
    """Reads the command line.

    Raises:
        InputError: an option cannot be used; the message says which.
    """
    parser = Parser(
        _MODULE,
        "Pretrains BERT with LAMB and 1-bit LAMB by the fastest published recipe, scaled down, and draws both.",
        "about 10 minutes on 2 cores",
    )
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    parser.add_argument("--model", choices=tuple(SIZES), default="tiny", help="Google's miniatures, the paper's two")
    parser.add_argument("--vocab-size", type=positive, default=4096, metavar="N", help="WordPieces to learn at most")
    parser.add_argument("--batch-size", type=positive, default=128, metavar="N", help="sequences of 128 tokens a step")
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="of the first phase")
    parser.add_argument("--lr", type=rate, default=1e-2, metavar="RATE", help="of the first phase at its peak")
    parser.add_argument("--freeze-step", type=freeze_step, metavar="N", help="of each phase; else a fifth of its steps")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights, order and masks")
    parser.add_argument("--ranks", type=positive, metavar="N", help="else the launcher's, or 2")
    parser.add_argument("--without-large", action="store_true", help="do not time BERT-large, which takes 10 GB a rank")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.corpus:
        load(options.corpus)
    check_writable(options.output, "--output")
    return _Settings(
        options.ranks,
        tuple(options.corpus) if options.corpus else None,
        options.model,
        options.vocab_size,
        options.batch_size,
        options.steps,
        options.lr,
        options.freeze_step,
        options.seed,
        not options.without_large,
        options.output,
    )


if __name__ == "__main__":
    sys.exit(main())
