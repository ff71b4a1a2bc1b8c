"""Does it pay to read long documents with sparse attention? BERT, on documents of 4096 tokens, in the same time.

Sparse attention against dense attention and against truncation to 512 tokens: the same weights, documents and masks,
compared after as many steps and after as much time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import machine
from experiments.common.command_line import Parser, fraction, positive, rate, seed
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.long_documents.plots import draw
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.sizes import SIZES
from experiments.tasks.tokens import Tokens, share_tokens, unigram_entropy
from thinwire.comm.threads import single

if TYPE_CHECKING:
    from experiments.long_documents.learning import DocumentLearner, LearningPlan

__all__ = ["main"]

_NAME = "long_documents"
_BLOCK = 64
_FEWEST_BLOCKS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a table, writes JSON and a picture; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        _run(options)
    except InputError as error:
        return refuse("experiments.long_documents", error)
    return 0


def _run(options: argparse.Namespace) -> None:
    # Importing transformers takes seconds, which a command line that is refused is spared.
    from experiments.long_documents.learning import LearningPlan, learners, train_in_turns

    tokens = share_tokens(
        single(60.0),
        lambda: load(options.corpus),
        options.vocab_size,
        options.document_length,
        options.validation_documents,
    )
    plan = LearningPlan(
        start_steps=options.start_steps,
        windows_a_step=options.start_windows,
        documents_a_step=options.batch_size,
        learning_rate=options.lr,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        window=options.window,
        block=_BLOCK,
        seed=options.seed,
    )
    systems = learners(SIZES[options.model], tokens, plan)
    train_in_turns(systems, 60 * options.minutes, options.turns)
    content = _content(options, plan, tokens, systems)
    write_json(options.output / f"{_NAME}.json", content)
    _print_table(content)
    draw(content, options.output / f"{_NAME}.png")
    print(f"Written: {options.output / _NAME}.json and .png", flush=True)


def _content(
    options: argparse.Namespace, plan: LearningPlan, tokens: Tokens, systems: Mapping[str, DocumentLearner]
) -> dict[str, Any]:
    """The JSON."""
    first = {name: learner.validate(options.window) for name, learner in systems.items()}
    runs = {
        name: {
            "documents_seen": learner.steps * options.batch_size,
            "tokens_seen": learner.steps * options.batch_size * _tokens_read(name, options),
            "final_loss": learner.curve.losses[-1],
            "final_loss_first_tokens": first[name],
            "curve": asdict(learner.curve),
        }
        for name, learner in systems.items()
    }
    steps = min(learner.steps for learner in systems.values())
    equal_steps = {"steps": steps, "losses": {name: one.curve.at_step(steps) for name, one in systems.items()}}
    return {
        "machine": machine.describe(),
        "settings": {
            "model": options.model,
            "corpus": corpus_name(options.corpus),
            "vocabulary": tokens.vocabulary,
            "document_length": options.document_length,
            "minutes": options.minutes,
            "validation_documents": len(tokens.validation),
            **asdict(plan),
        },
        "training_documents": len(tokens.training),
        "unigram_entropy": unigram_entropy(tokens),
        "findings": _findings(runs, equal_steps, options),
        "equal_steps": equal_steps,
        "equal_time": {
            "minutes": options.minutes,
            "losses": {name: run["final_loss"] for name, run in runs.items()},
        },
        "runs": runs,
    }


def _tokens_read(name: str, options: argparse.Namespace) -> int:
    return options.window if name == "truncated" else options.document_length


def _findings(
    runs: Mapping[str, Mapping[str, Any]], equal_steps: Mapping[str, Any], options: argparse.Namespace
) -> tuple[str, str]:
    """Two sentences: at equal time, and at equal steps."""
    final = {name: run["final_loss"] for name, run in runs.items()}
    more = runs["sparse"]["documents_seen"] / runs["dense"]["documents_seen"]
    time = (
        f"After {options.minutes:g} minutes each: loss {final['sparse']:.2f} with sparse attention, which took "
        f"{more:.1f}x dense attention's steps, {final['dense']:.2f} dense, {final['truncated']:.2f} truncated"
    )
    losses = equal_steps["losses"]
    steps = (
        f"After {equal_steps['steps']:,} steps each: {losses['sparse']:.2f} sparse, {losses['dense']:.2f} dense, "
        f"{losses['truncated']:.2f} truncated to {options.window:,} of {options.document_length:,} tokens"
    )
    return time, steps


def _print_table(content: Mapping[str, Any]) -> None:
    steps, window = content["equal_steps"], content["settings"]["window"]
    print(f"{'':10} {'steps':>8} {'tokens':>12} {'loss':>8} {f'first {window}':>10} {'at equal steps':>15}")
    for name, run in content["runs"].items():
        done = f"{run['curve']['steps'][-1]:8,} {run['tokens_seen']:12,}"
        losses = f"{run['final_loss']:8.3f} {run['final_loss_first_tokens']:10.3f} {steps['losses'][name]:15.3f}"
        print(f"{name:10} {done} {losses}")
    print(f"guessing by token frequency: {content['unigram_entropy']:.3f}")
    print("\n".join(content["findings"]))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.long_documents",
        "Pretrains BERT on long documents with sparse attention, with dense attention and truncated, and draws all.",
        "about an hour on 2 cores",
    )
    data = parser.add_argument_group("data and model")
    data.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    data.add_argument("--model", choices=tuple(SIZES), default="mini", help="which BERT")
    data.add_argument("--vocab-size", type=positive, default=4096, metavar="N", help="WordPieces to learn at most")
    data.add_argument("--document-length", type=positive, default=4096, metavar="N", help="tokens a document")
    data.add_argument("--window", type=positive, default=512, metavar="N", help="tokens that truncation leaves")
    data.add_argument("--validation-documents", type=positive, default=16, metavar="N", help="held out, at most")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--start-steps", type=seed, default=2400, metavar="N", help="on windows, all together first; 0: random weights"
    )
    training.add_argument("--start-windows", type=positive, default=4, metavar="N", help="windows a step, in those")
    training.add_argument("--minutes", type=rate, default=12.0, metavar="N", help="of training, for each system")
    training.add_argument("--turns", type=positive, default=16, metavar="N", help="in which they take them")
    training.add_argument("--batch-size", type=positive, default=1, metavar="N", help="documents a step")
    training.add_argument("--lr", type=rate, default=5e-4, metavar="RATE", help="constant after the warmup")
    training.add_argument("--warmup-steps", type=positive, default=100, metavar="N", help="of the learning rate")
    training.add_argument("--weight-decay", type=fraction, default=0.01, metavar="RATE", help="of matrices")
    training.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights, order and masks")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    if options.document_length < _FEWEST_BLOCKS * _BLOCK:
        raise InputError(f"--document-length {options.document_length} must be at least {_FEWEST_BLOCKS * _BLOCK}")
    if options.window >= options.document_length or options.document_length % options.window:
        raise InputError(
            f"--window {options.window} must divide --document-length {options.document_length}, and be less"
        )
    if options.corpus:
        load(options.corpus)
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
