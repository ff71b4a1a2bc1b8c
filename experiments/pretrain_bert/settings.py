"""The command line of `experiments.pretrain_bert`: read, checked, and described for the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.command_line import Parser, fraction, freeze_step, positive, rate, seed
from experiments.common.errors import InputError
from experiments.common.results import OUTPUT, check_writable
from experiments.pretrain_bert.engine_settings import COMPARED, EngineSettings
from experiments.tasks.corpus import Corpus, corpus_name, load
from experiments.tasks.sizes import SIZES
from experiments.training.optimizers import ENGINE, FREEZE_OPTIONS
from experiments.training.plans import Plan

__all__ = ["DEFAULT_RANKS", "PretrainSettings", "parse"]

DEFAULT_RANKS = 2

_RUNS = Path(__file__).parents[2] / "runs"
_SHORTEST_SEQUENCE = 8
_COMPARED = " and ".join(COMPARED)


@dataclass(frozen=True)
class PretrainSettings:
    """What to train, on what, for how long, and where the outcome goes; see `--help` for each."""

    model: str
    pre_ln: bool
    corpus: tuple[Path, ...] | None
    vocab_size: int
    sequence_length: int
    dropout: float
    plan: Plan
    engine: EngineSettings
    ranks: int | None
    validation_sequences: int
    print_every: int
    checkpoint_every: int
    resume: bool
    output: Path
    checkpoints: Path

    def read_corpus(self) -> Corpus:
        """The text asked for."""
        return load(self.corpus)

    @property
    def corpus_name(self) -> str:
        """What the picture calls the text."""
        return corpus_name(self.corpus)

    def describe(self, batch_size: int) -> dict[str, Any]:
        """What makes the numbers what they are: no folder, no machine. `batch_size`: sequences of a step, all ranks."""
        return {
            "model": self.model,
            "pre_ln": self.pre_ln,
            "corpus": self.corpus_name,
            "vocab_size": self.vocab_size,
            "sequence_length": self.sequence_length,
            "train_batch_size": batch_size,
            "dropout": self.dropout,
            "validation_sequences": self.validation_sequences,
            "steps": self.plan.steps,
            "warmup_steps": None if self.engine.scheduled else self.plan.warmup_steps,
            "learning_rate": self.plan.learning_rate,
            "weight_decay": self.plan.weight_decay,
            "freeze_step": self.plan.freeze_step,
            "evaluate_every": self.plan.evaluate_every,
            "seed": self.plan.seed,
            "zero": self.zero,
            "config": self.engine.file,
        }

    @property
    def zero(self) -> int:
        """The ZeRO stage."""
        return self.engine.check(self.engine.optimizers[0]).zero_optimization.stage


def parse(arguments: Sequence[str]) -> PretrainSettings:
    """Reads the command line and checks all that can be checked without training.

    Raises:
        InputError: an option cannot be used; the message says which, and what would do.
    """
    options = _parser().parse_args(arguments)
    warmup = options.warmup_steps or options.steps // 10
    if warmup >= options.steps:
        raise InputError(f"--warmup-steps {warmup} must be less than --steps {options.steps}")
    if options.sequence_length < _SHORTEST_SEQUENCE:
        raise InputError(f"--sequence-length {options.sequence_length} must be at least {_SHORTEST_SEQUENCE}")
    if options.corpus:
        load(options.corpus)
    engine = EngineSettings(options, max(1, options.steps // 5))
    params = [engine.check(optimizer).optimizer.params for optimizer in engine.optimizers]
    seed = engine.check(engine.optimizers[0]).seed
    if engine.check(engine.optimizers[0]).progressive_layer_drop.enabled and not options.pre_ln:
        raise InputError("--config drops layers, which a post-LN BERT cannot leave out: give --pre-ln as well")
    check_writable(options.output, "--output")
    check_writable(options.checkpoints, "--checkpoints")
    return PretrainSettings(
        model=options.model,
        pre_ln=options.pre_ln,
        corpus=tuple(options.corpus) if options.corpus else None,
        vocab_size=options.vocab_size,
        sequence_length=options.sequence_length,
        dropout=options.dropout,
        plan=Plan(
            steps=options.steps,
            warmup_steps=warmup,
            learning_rate=params[-1]["lr"],
            weight_decay=params[-1]["weight_decay"],
            freeze_step=next((params[-1][option] for option in FREEZE_OPTIONS if option in params[-1]), "auto"),
            evaluate_every=options.evaluate_every or max(1, options.steps // 50),
            seed=seed,
        ),
        engine=engine,
        ranks=options.ranks,
        validation_sequences=options.validation_sequences,
        print_every=options.print_every,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        output=options.output,
        checkpoints=options.checkpoints,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "experiments.pretrain_bert",
        "Pretrains BERT by masked-language modelling with AdamW and with 1-bit Adam, and draws both.",
        "about 5 minutes on 2 cores",
    )
    data = parser.add_argument_group("data and model")
    data.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    data.add_argument("--model", choices=tuple(SIZES), default="tiny", help="Google's miniatures, the paper's two")
    data.add_argument("--pre-ln", action="store_true", help="normalise before each branch: layers that can be dropped")
    data.add_argument("--vocab-size", type=positive, default=4096, metavar="N", help="WordPieces to learn at most")
    data.add_argument("--sequence-length", type=positive, default=32, metavar="N", help="tokens a sequence")
    data.add_argument("--validation-sequences", type=positive, default=1024, metavar="N", help="held out, at most")
    data.add_argument("--dropout", type=fraction, default=0.0, metavar="P", help="0 suits a single pass over the text")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--optimizer",
        nargs="+",
        choices=ENGINE,
        help=f"in this order; else {_COMPARED}, at stage 3 adamw",
    )
    training.add_argument("--zero", type=int, choices=range(4), metavar="0|1|2|3", help="ZeRO stage; else 1")
    training.add_argument(
        "--config", type=Path, metavar="FILE", help="the engine's configuration, with DeepSpeed's keys, in JSON"
    )
    training.add_argument("--batch-size", type=positive, metavar="N", help="sequences a rank a micro-batch; else 16")
    training.add_argument("--steps", type=positive, default=3000, metavar="N", help="optimizer steps")
    training.add_argument("--warmup-steps", type=positive, metavar="N", help="of the learning rate; else a tenth")
    training.add_argument("--lr", type=rate, metavar="RATE", help="at its peak; it then falls to 0; else 0.001")
    training.add_argument("--weight-decay", type=fraction, metavar="RATE", help="of matrices; else 0.01")
    training.add_argument(
        "--freeze-step", type=freeze_step, metavar="N", help="of what freezes, or auto; else a fifth of the steps"
    )
    training.add_argument("--seed", type=seed, metavar="N", help="of weights, order and masks; else 0")
    running = parser.add_argument_group("running")
    running.add_argument("--ranks", type=positive, metavar="N", help=f"else the launcher's, or {DEFAULT_RANKS}")
    running.add_argument("--evaluate-every", type=positive, metavar="N", help="steps; else a fiftieth of them")
    running.add_argument("--print-every", type=positive, default=100, metavar="N", help="steps, outside a terminal")
    running.add_argument("--checkpoint-every", type=positive, default=1000, metavar="N", help="steps")
    running.add_argument("--resume", action="store_true", help="from the last checkpoint; without it, start over")
    running.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    running.add_argument("--checkpoints", type=Path, default=_RUNS, metavar="DIR", help="shared by all ranks")
    return parser
