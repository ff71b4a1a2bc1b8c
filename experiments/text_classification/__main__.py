"""Does Hugging Face's Trainer classify as well with 1-bit Adam? Beside the unchanged Trainer, AdamW and DDP.

Starts its ranks by itself (`python -m experiments.text_classification`), on a loopback interface of their own where the
system allows it, or runs unchanged under torchrun.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import loopback, machine
from experiments.common.command_line import Parser, positive, rate
from experiments.common.errors import on_every_rank
from experiments.common.launching import launch
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.passages import Passages, read_texts, share_passages
from experiments.tasks.sizes import SIZES
from experiments.text_classification.findings import BASELINE, Finding, find, sentence
from experiments.training.optimizers import COMPRESSED, OPTIMIZERS
from experiments.training.reporting import human_bytes
from experiments.training.sweep import best_rate, methods_beside, sweep
from thinwire.comm import Communicator

if TYPE_CHECKING:
    from experiments.text_classification.learning import Classifier, Outcome, Recipe

__all__ = ["main", "parse", "study"]

_NAME = "text_classification"
_MODULE = f"experiments.{_NAME}"
_DEFAULT_RANKS = 2
_METHODS = (BASELINE, "onebit-adam")
_RATES = (2.5e-4, 5e-4, 1e-3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_MODULE, parse, study, given, _DEFAULT_RANKS)


def study(comm: Communicator, options: argparse.Namespace) -> None:
    """Finds every method's best rate with the first seed, trains the other seeds at it, and writes what came out.

    Raises:
        InputError: on every rank, for texts that cannot be used.
    """
    # Importing transformers takes seconds, which a command line that is refused is spared.
    from experiments.text_classification.learning import Classifier, Recipe, resumes_bit_for_bit

    passages = share_passages(comm, lambda: read_texts(options.corpus), options.vocab_size, options.length)
    recipe = Recipe(
        size=SIZES[options.model],
        steps=options.steps,
        warmup_steps=max(1, options.steps // 10),
        freeze_step=options.freeze_step or max(1, options.steps // 5),
        block_size=options.block_size,
        batch_size=options.batch_size,
        weight_decay=0.01,
        max_norm=1.0,
    )
    with tempfile.TemporaryDirectory() as own:
        folder = Path(comm.all_gather_bytes(own.encode())[0].decode())
        classifier = Classifier(passages, recipe, folder)
        started = time.perf_counter()
        swept: dict[str, dict[float, float]] = {}
        runs: dict[str, list[Outcome]] = {}
        for name in options.methods:
            swept[name], runs[name] = _learn(classifier, name, options, comm)
        resumed = {}
        for name in options.methods:
            if name in COMPRESSED:
                save_at = max(1, 3 * recipe.steps // 5)
                same = resumes_bit_for_bit(classifier, name, best_rate(swept[name]), 0, save_at)
                resumed[name] = all(map(any, comm.all_gather_bytes(bytes([same]))))
        seconds = time.perf_counter() - started
        comm.barrier()  # nobody takes the folder away under others
    found = find(swept, runs, recipe.freeze_step)
    content = _content(options, passages, recipe, comm) | {"seconds": seconds, "resumes_bit_for_bit": resumed}
    on_every_rank(comm, lambda: _write_results(content, swept, runs, found, options, comm))


def _learn(
    classifier: Classifier, name: str, options: argparse.Namespace, comm: Communicator
) -> tuple[dict[float, float], list[Outcome]]:
    """Validation errors of the first seed by learning rate, and every seed's outcome at the best one."""
    first: dict[float, Outcome] = {}

    def error(learning_rate: float) -> float:
        first[learning_rate] = _run(classifier, name, learning_rate, 0, comm)
        return 100 - first[learning_rate].validation

    rates = sorted(options.rates)
    errors = sweep(error, rates) if len(rates) > 1 else {rates[0]: error(rates[0])}
    best = best_rate(errors)
    return errors, [first[best], *(_run(classifier, name, best, seed, comm) for seed in range(1, options.seeds))]


def _run(classifier: Classifier, name: str, learning_rate: float, seed: int, comm: Communicator) -> Outcome:
    started = time.perf_counter()
    outcome = classifier.run(name, learning_rate, seed)
    if comm.rank == 0:
        seconds = time.perf_counter() - started
        print(
            f"{OPTIMIZERS[name].label}, rate {learning_rate:g}, seed {seed}: validation {outcome.validation:.2f}%, "
            f"test {outcome.test:.2f}%, {human_bytes(outcome.interface[-1])} in the last step, {seconds:.0f} s",
            flush=True,
        )
    return outcome


def _content(options: argparse.Namespace, passages: Passages, recipe: Recipe, comm: Communicator) -> dict[str, Any]:
    """The JSON, but for what was found."""
    return {
        "ranks": comm.size,
        "machine": machine.describe(),
        "own_loopback": loopback.is_own(),
        "settings": {
            "classes": list(passages.classes),
            "vocabulary": passages.vocabulary,
            "passage_tokens": options.length,
            "passages": [int((passages.part == part).sum()) for part in range(3)],
            "model": options.model,
            **asdict(recipe),
        },
    }


def _write_results(
    content: dict[str, Any],
    swept: Mapping[str, Mapping[float, float]],
    runs: Mapping[str, Sequence[Outcome]],
    found: Mapping[str, Finding],
    options: argparse.Namespace,
    comm: Communicator,
) -> None:
    """JSON, picture and a table, on rank 0."""
    from experiments.text_classification.plots import draw

    if comm.rank:
        return
    content["findings"] = [sentence(name, one) for name, one in found.items() if name != BASELINE]
    content["methods"] = {
        name: {
            **asdict(found[name]),
            "validation_error_by_learning_rate": {f"{tried:g}": error for tried, error in swept[name].items()},
            "runs": [
                {"seed": one.seed, "validation": one.validation, "test": one.test, "interface": sum(one.interface)}
                for one in outcomes
            ],
        }
        for name, outcomes in runs.items()
    }
    write_json(options.output / f"{_NAME}.json", content)
    draw(content, options.output / f"{_NAME}.png")
    _print_table(content, found)
    print(f"Written: {options.output / _NAME}.json and .png", flush=True)


def _print_table(content: Mapping[str, Any], found: Mapping[str, Finding]) -> None:
    print(f"{'':12} {'best rate':>10} {'test':>8} {'deviation':>10} {'a frozen step':>14}")
    for name, one in found.items():
        edge = "" if one.inside_the_sweep else "  the best rate is the last one tried"
        print(
            f"{OPTIMIZERS[name].label:12} {one.learning_rate:10g} {one.test:7.2f}% {one.deviation:10.2f} "
            f"{human_bytes(one.frozen_bytes):>14}{edge}"
        )
    for name, same in content["resumes_bit_for_bit"].items():
        print(f"{OPTIMIZERS[name].label} {'goes on' if same else 'does not go on'} bit for bit from a checkpoint")
    if not content["own_loopback"]:
        print("The interface was not this job's alone: other programs' bytes are counted too")
    print("\n".join(content["findings"]))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads and checks the command line; raises `InputError` for what cannot be used."""
    parser = Parser(
        _MODULE,
        "Trains BERT to classify text with Hugging Face's Trainer, by AdamW and by 1-bit Adam.",
        "under an hour on 2 cores",
    )
    parser.add_argument(
        "--corpus",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="UTF-8 texts, each a class; else packages of Python's own",
    )
    parser.add_argument(
        "--methods", nargs="+", choices=(BASELINE, *COMPRESSED), default=_METHODS, help="adamw, and what to compare"
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="mini", help="which BERT")
    parser.add_argument("--vocab-size", type=positive, default=4096, metavar="N", help="WordPieces to learn at most")
    parser.add_argument("--length", type=positive, default=8, metavar="N", help="tokens a passage")
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="passages a rank and step")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each at its best rate")
    parser.add_argument("--steps", type=positive, default=500, metavar="N", help="of every run")
    parser.add_argument(
        "--freeze-step", type=positive, metavar="N", help="of 1-bit optimizers; else a fifth of --steps"
    )
    parser.add_argument("--block-size", type=positive, default=2048, metavar="N", help="elements that share a scale")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=rate,
        default=_RATES,
        metavar="RATE",
        help="learning rates to try first; one: no search",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help=f"else the launcher's, or {_DEFAULT_RANKS}")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    options.rates = list(dict.fromkeys(options.rates))
    options.methods = methods_beside(BASELINE, options.methods)
    if options.corpus:
        read_texts(options.corpus)
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(loopback.run_on_own(_MODULE, main))
