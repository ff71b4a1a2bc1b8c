"""Does sharding change what is learned? ZeRO stages against each other, 1-bit Adam sharded against unsharded, and runs
that stop on four ranks and go on with another number.

Starts its ranks by itself, one number of them after another.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common import machine
from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.launching import refuse_launchers
from experiments.common.results import OUTPUT, check_writable, read_json, write_json
from experiments.stages import losses
from experiments.stages.findings import EXACT_ON, RESUME_ON, RESUMED, SAVE_ON, SHARDED_ON, SYSTEMS, find
from experiments.stages.losses import Job, Run
from experiments.stages.plots import draw
from experiments.tasks.corpus import load, standard_library_files

__all__ = ["main", "sharded_job", "small_job", "write_results"]

_NAME = "stages"
_SMALL_CORPUS_FILES = 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints what was found, writes JSON and a picture; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
    except InputError as error:
        return refuse("experiments.stages", error)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small: dict[int, Any] = {}
        # First the ranks that save what the others take up.
        for ranks in (SAVE_ON, *(ranks for ranks in RESUME_ON if ranks != SAVE_ON)):
            job = small_job(ranks, options.small_steps, options.corpus, folder)
            if code := _train(job, ranks, folder, small):
                return code
        job = sharded_job(options.steps, options.seeds, options.corpus)
        sharded: dict[int, Any] = {}
        if code := _train(job, SHARDED_ON, folder, sharded):
            return code
    write_results(options.output, small, job, sharded[SHARDED_ON])
    return 0


def small_job(ranks: int, steps: int, corpus: Sequence[Path] | None, folder: Path) -> Job:
    """BERT-tiny: AdamW at every stage, and both optimizers saved on four ranks or taken up on others."""
    runs = []
    if ranks in EXACT_ON:
        runs = [Run(f"adamw, stage {stage}", "adamw", stage) for stage in range(4)]
    for optimizer in RESUMED:
        saved = str(folder / optimizer)
        if ranks == SAVE_ON:
            runs.append(Run(f"{optimizer}, saved", optimizer, 1, save=saved, save_at=steps * 3 // 5))
        if ranks in RESUME_ON:
            runs.append(Run(f"{optimizer}, resumed", optimizer, 1, load=saved))
    files = corpus or standard_library_files()[:_SMALL_CORPUS_FILES]
    return Job(
        model="tiny",
        vocabulary=4096,
        batch=24,
        steps=steps,
        warmup_steps=steps // 10,
        learning_rate=1e-3,
        freeze_step=max(1, steps * 3 // 10),
        evaluate_every=steps,
        corpus=[str(file) for file in files],
        runs=runs,
    )


def sharded_job(steps: int, seeds: int, corpus: Sequence[Path] | None) -> Job:
    """BERT-mini: 1-bit Adam unsharded and at two stages, over several seeds, and once in bf16."""
    runs = [
        Run(f"{system}, seed {seed}", "onebit-adam", stage, seed=seed)
        for seed in range(seeds)
        for system, stage in SYSTEMS.items()
    ]
    return Job(
        model="mini",
        # With 4096 tokens so short a run does not get below the loss of guessing by their frequency.
        vocabulary=1024,
        batch=12,
        steps=steps,
        warmup_steps=steps // 10,
        learning_rate=5e-4,
        freeze_step=max(1, steps * 5 // 14),
        evaluate_every=max(1, steps // 14),
        corpus=[str(file) for file in corpus] if corpus else None,
        runs=[*runs, Run("ZeRO-1 in bf16, seed 0", "onebit-adam", 1, bf16=True)],
    )


def write_results(output: Path, small: Mapping[int, Any], job: Job, sharded: Mapping[str, Any]) -> None:
    """JSON, picture and summary of the losses that were written: of small jobs by ranks, and of the sharded one."""
    found = find({ranks: one["losses"] for ranks, one in small.items()}, sharded["losses"])
    content = {
        "machine": machine.describe(),
        "finding": asdict(found),
        "sharded": {"ranks": SHARDED_ON, "job": asdict(job) | {"corpus": None, "runs": None}, **sharded},
        "small": {str(ranks): one["losses"] for ranks, one in small.items()},
    }
    write_json(output / f"{_NAME}.json", content)
    draw(content, output / f"{_NAME}.png")
    print("\n".join(found.sentences))
    print(f"Written: {output / _NAME}.json and .png", flush=True)


def _train(job: Job, ranks: int, folder: Path, results: dict[int, Any]) -> int:
    """Has the ranks train, and adds what they wrote to `results`; returns their exit code."""
    asked, written = folder / f"job-{ranks}.json", folder / f"losses-{ranks}.json"
    write_json(asked, asdict(job))
    code = losses.main(["--job", str(asked), "--output", str(written), "--ranks", str(ranks)])
    if code == 0:
        results[ranks] = read_json(written)
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.stages",
        "Compares the losses of ZeRO stages, of sharded 1-bit Adam, and of resumed runs.",
        "about 20 minutes on 2 cores",
    )
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="UTF-8 text; else the standard library")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each sharding of 1-bit Adam")
    parser.add_argument("--steps", type=positive, default=700, metavar="N", help="of those")
    parser.add_argument("--small-steps", type=positive, default=100, metavar="N", help="of all other runs")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for the picture and the JSON")
    options = parser.parse_args(arguments)
    refuse_launchers()
    if options.corpus:
        load(options.corpus)
    check_writable(options.output, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
