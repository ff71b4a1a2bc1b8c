"""Does Lion survive one bit? 1-bit Lion beside exact Lion and AdamW on text, each at its own best learning rate.

Starts its ranks by itself (`python -m experiments.lion`), or runs unchanged under a launcher.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import on_every_rank
from experiments.common.launching import launch
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.lion.findings import BASELINE, Finding, find, sentences
from experiments.lion.plots import draw
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.next_character import CharacterModelSize, NextCharacterTask, share_text
from experiments.training.learners import LoopLearner
from experiments.training.optimizers import COMPRESSED, EXACT, OPTIMIZERS, PARENTS
from experiments.training.plans import Plan
from experiments.training.reporting import human_bytes, train_to_end
from experiments.training.sweep import best_rate, methods_beside, sweep
from experiments.training.trainer import Outcome, Trainer
from thinwire.comm import Communicator

__all__ = ["main", "parse", "study"]

_NAME = "lion"
_DEFAULT_RANKS = 4
_SIZE = CharacterModelSize(layers=3, width=96, heads=4, length=64)
_WINDOWS_A_RANK = 8
_METHODS = tuple(name for name in (BASELINE, "lion", "onebit-lion") if name in OPTIMIZERS)


@dataclass(frozen=True)
class _Recipe:
    """What suits an exact optimizer and what is made from it: peaks to try first, decay of matrices, other options."""

    rates: tuple[float, ...]
    weight_decay: float
    options: dict[str, Any] = field(default_factory=dict)


_RECIPES = {
    "adamw": _Recipe((2.5e-3, 5e-3, 1e-2, 2e-2), 0.01),
    "lamb": _Recipe((5e-3, 1e-2, 2e-2, 4e-2), 0.01),
    # Lower rates and more decay than AdamW's, as its authors advise. Its default β₂ of 0.99 is for long runs: it
    # remembers 100 steps.
    "lion": _Recipe((5e-4, 1e-3, 2e-3, 4e-3), 0.1, {"betas": (0.9, 0.95)}),
}

Runs = dict[str, list[Outcome]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.lion", parse, study, given, _DEFAULT_RANKS)


def study(comm: Communicator, options: argparse.Namespace) -> None:
    """Finds every method's best rate with the first seed, trains the other seeds at it, and writes what came out.

    Raises:
        InputError: on every rank, for a corpus that cannot be used.
    """
    text = share_text(comm, lambda: load(options.corpus), _SIZE.length)
    task = NextCharacterTask(text, _SIZE, _WINDOWS_A_RANK, options.validation_windows)
    swept: dict[str, dict[float, float]] = {}
    runs: Runs = {}
    for name in options.methods:
        swept[name], runs[name] = _learn(name, task, options, comm)
    on_every_rank(comm, lambda: _write_results(swept, runs, options, comm))


def _learn(
    name: str, task: NextCharacterTask, options: argparse.Namespace, comm: Communicator
) -> tuple[dict[float, float], list[Outcome]]:
    """Final losses of the first seed by learning rate, and every seed's outcome at the best one."""
    first: dict[float, Outcome] = {}

    def final_loss(rate: float) -> float:
        first[rate] = _run(name, _plan(name, rate, 0, options.steps), task, comm)
        return first[rate].final_loss

    losses = sweep(final_loss, _recipe(name).rates)
    best = best_rate(losses)
    others = [_run(name, _plan(name, best, seed, options.steps), task, comm) for seed in range(1, options.seeds)]
    return losses, [first[best], *others]


def _recipe(name: str) -> _Recipe:
    return _RECIPES[PARENTS.get(name, name)]


def _plan(name: str, learning_rate: float, seed: int, steps: int) -> Plan:
    return Plan(
        steps=steps,
        warmup_steps=steps // 10,
        learning_rate=learning_rate,
        weight_decay=_recipe(name).weight_decay,
        freeze_step=max(1, steps // 5),
        evaluate_every=max(1, steps // 16),
        seed=seed,
        local_step_scaler=max(1, steps // 10),
    )


def _run(name: str, plan: Plan, task: NextCharacterTask, comm: Communicator) -> Outcome:
    learner = LoopLearner(task.build_model(plan.seed), plan, name, comm, **_recipe(name).options)
    return train_to_end(
        Trainer(task, plan, learner, comm),
        f"{OPTIMIZERS[name].label}, rate {plan.learning_rate:g}, seed {plan.seed}",
        items_a_step=comm.size * _WINDOWS_A_RANK * _SIZE.length,
        unit="characters",
    )


def _write_results(
    swept: Mapping[str, Mapping[float, float]], runs: Runs, options: argparse.Namespace, comm: Communicator
) -> None:
    """JSON, picture and a table, on rank 0."""
    if comm.rank:
        return
    found = find(swept, runs)
    content = {
        "ranks": comm.size,
        "backend": comm.backend,
        "machine": machine.describe(),
        "findings": sentences(found),
        "settings": {
            "corpus": corpus_name(options.corpus),
            "model": asdict(_SIZE),
            "windows_a_rank": _WINDOWS_A_RANK,
            "validation_windows": options.validation_windows,
            "steps": options.steps,
        },
        "methods": {
            name: {
                **asdict(found[name]),
                "final_loss_by_learning_rate": {f"{rate:g}": loss for rate, loss in swept[name].items()},
                "options": _recipe(name).options,
                "plan": asdict(_plan(name, found[name].learning_rate, 0, options.steps)),
                "runs": [asdict(outcome) for outcome in outcomes],
            }
            for name, outcomes in runs.items()
        },
    }
    write_json(options.output / f"{_NAME}.json", content)
    draw(content, options.output / f"{_NAME}.png")
    _print_table(found)
    print(f"Written: {options.output / _NAME}.json and .png", flush=True)


def _print_table(found: Mapping[str, Finding]) -> None:
    print(f"{'':12} {'best rate':>10} {'final loss':>11} {'deviation':>10} {'sent by a rank':>15}")
    for name, one in found.items():
        edge = "" if one.inside_the_sweep else "  the best rate is the last one tried"
        print(
            f"{OPTIMIZERS[name].label:12} {one.learning_rate:10g} {one.final_loss:11.4f} {one.deviation:10.4f} "
            f"{human_bytes(one.bytes_sent):>15}{edge}"
        )
    print("\n".join(sentences(found)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads and checks the command line; raises `InputError` for what cannot be used."""
    parser = Parser(
        "experiments.lion",
        "Trains Lion, 1-bit Lion and AdamW, each at its best rate, and draws them.",
        "about 10 minutes on 2 cores",
    )
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=(*EXACT, *COMPRESSED),
        default=_METHODS,
        help=f"to compare; {BASELINE} among them",
    )
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each at its best rate")
    parser.add_argument("--steps", type=positive, default=800, metavar="N", help="of every run")
    parser.add_argument("--validation-windows", type=positive, default=512, metavar="N", help="held out")
    parser.add_argument("--ranks", type=positive, metavar="N", help=f"else the launcher's, or {_DEFAULT_RANKS}")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    options.methods = methods_beside(BASELINE, options.methods)
    if options.corpus:
        load(options.corpus)
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
