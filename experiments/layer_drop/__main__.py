"""What does progressive layer drop save, and what does it cost? Pre-LN BERT with and without it.

Loss over samples and over time for several seeds, higher learning rates beside post-LN BERT's, kept layers beside the
formula, and the time of a step with twelve layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import machine
from experiments.common.command_line import Parser, fraction, positive, rate
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.sizes import SIZES, BertSize
from experiments.tasks.tokens import Tokens, share_tokens, unigram_entropy
from thinwire.comm.threads import single

if TYPE_CHECKING:
    from experiments.layer_drop.findings import Finding, Run
    from experiments.layer_drop.learning import KeepRates, Recipe
    from experiments.layer_drop.step_time import Saving, Workload

__all__ = ["main"]

_NAME = "layer_drop"
_WEIGHT_DECAY = 0.01
_SHORTEST_SEQUENCE = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and measures, prints tables, writes JSON and two pictures; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        _run(options)
    except InputError as error:
        return refuse("experiments.layer_drop", error)
    return 0


def _run(options: argparse.Namespace) -> None:
    # Importing transformers takes seconds, which a command line that is refused is spared.
    from experiments.layer_drop.findings import find
    from experiments.layer_drop.learning import Recipe
    from experiments.layer_drop.plots import draw
    from experiments.layer_drop.step_time import Workload, measure_keep_rates, measure_savings

    tokens = share_tokens(
        single(60.0),
        lambda: load(options.corpus),
        options.vocab_size,
        options.sequence_length,
        options.validation_sequences,
    )
    size = SIZES[options.model]
    recipe = Recipe(
        size=size,
        sequences_a_step=options.batch_size,
        steps=options.steps,
        warmup_steps=max(1, options.steps // 10),
        weight_decay=_WEIGHT_DECAY,
        theta=options.theta,
        evaluate_every=max(1, options.steps // 20),
    )
    deep = BertSize(options.layers, size.width, size.heads)
    workload = Workload(deep, options.timed_sequences, options.timed_length, options.theta)
    keep_rates = measure_keep_rates(options.layers, options.theta, options.keep_rate_steps)
    savings = measure_savings(workload, options.rounds)
    runs = _learn(tokens, recipe, options)
    found = find(runs, options.lr, savings, keep_rates)
    content = _content(options, recipe, workload, tokens, savings, keep_rates, runs, found)
    write_json(options.output / f"{_NAME}.json", content)
    draw(content, options.output / f"{_NAME}.png")
    _print_tables(found, savings, content["unigram_entropy"])
    print(f"Written: {options.output / _NAME}.json, .png and _details.png", flush=True)


def _learn(tokens: Tokens, recipe: Recipe, options: argparse.Namespace) -> list[Run]:
    """All seeds of both pre-LN systems at the usual rate; the first seed of all three systems at every rate."""
    from experiments.layer_drop.findings import Run
    from experiments.layer_drop.learning import DROPPING, POST_LN, PRE_LN, DropLearner, train_in_turns

    asked = [(system, options.lr, seed) for seed in range(options.seeds) for system in (PRE_LN, DROPPING)]
    asked.append((POST_LN, options.lr, 0))
    asked += [(system, higher, 0) for higher in options.higher_lr for system in (POST_LN, PRE_LN, DROPPING)]
    learners = [
        DropLearner(system, tokens, recipe, recipe.plan(learning_rate, seed)) for system, learning_rate, seed in asked
    ]
    train_in_turns(learners)
    return [
        Run(one.system, one.plan.learning_rate, one.plan.seed, one.parameters, one.curve, one.keep_rates())
        for one in learners
    ]


def _content(
    options: argparse.Namespace,
    recipe: Recipe,
    workload: Workload,
    tokens: Tokens,
    savings: dict[str, Saving],
    keep_rates: KeepRates,
    runs: Sequence[Run],
    found: Finding,
) -> dict[str, Any]:
    """The JSON."""
    return {
        "machine": machine.describe(),
        "findings": found.sentences,
        "finding": asdict(found),
        "settings": {
            "model": options.model,
            "corpus": corpus_name(options.corpus),
            "vocabulary": tokens.vocabulary,
            "sequence_length": options.sequence_length,
            "validation_sequences": len(tokens.validation),
            **asdict(recipe),
        },
        "unigram_entropy": unigram_entropy(tokens),
        "step_time": {"workload": asdict(workload), **{name: asdict(saving) for name, saving in savings.items()}},
        "keep_rates": {"steps": options.keep_rate_steps, **asdict(keep_rates)},
        "runs": [asdict(run) for run in runs],
    }


def _print_tables(found: Finding, savings: dict[str, Saving], entropy: float) -> None:
    for name, saving in savings.items():
        kept = sum(saving.kept) / len(saving.kept) / saving.layers
        drawn = f"mean of all pairs {sum(saving.seconds) / sum(saving.seconds_without):.3f} with {kept:.3f} kept"
        print(f"{name:15} {saving.ratio:.3f} of the time, where {saving.expected:.3f} of the layers are kept ({drawn})")
    for system, loss in found.final_loss.items():
        print(
            f"{system:15} final loss {loss:.4f} (deviation {found.deviation[system]:.4f}), rate {found.learning_rate:g}"
        )
    print(f"{'rate':15} " + " ".join(f"{name:>10}" for name in found.loss_by_rate))
    for learning_rate in next(iter(found.loss_by_rate.values())):
        losses = [by_rate[learning_rate] for by_rate in found.loss_by_rate.values()]
        print(f"{learning_rate:15} " + " ".join("broke down" if loss is None else f"{loss:10.3f}" for loss in losses))
    print(f"guessing by token frequency: {entropy:.3f}")
    for baseline, factor in found.sooner.items():
        sooner = "never" if factor is None else f"in {1 / factor:.2f} of its time"
        print(f"layer drop has the final loss of {baseline}: {sooner}")
    print("\n".join(found.sentences))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.layer_drop",
        "Trains BERT with and without progressive layer drop, and draws both.",
        "about 40 minutes on 2 cores",
    )
    data = parser.add_argument_group("data and model")
    data.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    data.add_argument("--model", choices=tuple(SIZES), default="mini", help="which BERT")
    data.add_argument("--vocab-size", type=positive, default=1024, metavar="N", help="WordPieces to learn at most")
    data.add_argument("--sequence-length", type=positive, default=32, metavar="N", help="tokens a sequence")
    data.add_argument("--validation-sequences", type=positive, default=256, metavar="N", help="held out, at most")
    training = parser.add_argument_group("training")
    training.add_argument("--theta", type=fraction, default=0.5, metavar="P", help="where θ settles")
    training.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs with drop and without")
    training.add_argument("--steps", type=positive, default=1500, metavar="N", help="of every run")
    training.add_argument("--batch-size", type=positive, default=12, metavar="N", help="sequences a step")
    training.add_argument("--lr", type=rate, default=5e-4, metavar="RATE", help="peak, at which there are all seeds")
    training.add_argument(
        "--higher-lr", nargs="+", type=rate, default=[1e-3, 2e-3, 4e-3], metavar="RATE", help="peaks to try, one seed"
    )
    timing = parser.add_argument_group("step time")
    timing.add_argument("--layers", type=positive, default=12, metavar="N", help="of the stack, of the model's width")
    timing.add_argument("--timed-sequences", type=positive, default=8, metavar="N", help="a step")
    timing.add_argument("--timed-length", type=positive, default=128, metavar="N", help="tokens a sequence")
    timing.add_argument("--rounds", type=positive, default=80, metavar="N", help="steps of each kind")
    timing.add_argument("--keep-rate-steps", type=positive, default=10_000, metavar="N", help="to count kept layers in")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    if options.sequence_length < _SHORTEST_SEQUENCE:
        raise InputError(f"--sequence-length {options.sequence_length} must be at least {_SHORTEST_SEQUENCE}")
    if options.lr in options.higher_lr or len(set(options.higher_lr)) < len(options.higher_lr):
        raise InputError("--higher-lr takes rates that differ from --lr and from each other")
    if options.steps < 2:
        raise InputError("--steps must be at least 2, of which the learning rate rises in the first tenth")
    if options.corpus:
        load(options.corpus)
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
