"""Draws the pictures of recorded results again, from their JSON: nothing is measured, and no number changes.

`python -m experiments.redraw` draws all that `results/` holds; names choose some; `--results` reads another folder.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.command_line import Parser
from experiments.common.errors import InputError, refuse
from experiments.common.results import RESULTS, check_writable, read_json

__all__ = ["drawing_of", "main"]

Drawing = Callable[[Mapping[str, Any], Path], None]

_DRAWN_BY = {
    "bench_engine": "experiments.benchmarks.engine_plots",
    "bench_kernels": "experiments.benchmarks.kernel_plots",
    "bert_recipe": "experiments.bert_recipe.plots",
    "convergence": "experiments.convergence.plots",
    "ethernet": "experiments.ethernet.race.step_plots",
    "ethernet_losses": "experiments.ethernet.race.loss_report",
    "frontier": "experiments.frontier.plots",
    "frontier_outer": "experiments.frontier.outer_plots",
    "layer_drop": "experiments.layer_drop.plots",
    "lion": "experiments.lion.plots",
    "long_documents": "experiments.long_documents.plots",
    "long_sequences": "experiments.long_sequences.plots",
    "pipelines": "experiments.ethernet.pipelines",
    "pretrain_bert": "experiments.pretrain_bert.plots",
    "stages": "experiments.stages.plots",
    "text_classification": "experiments.text_classification.plots",
}
"""The module whose `draw(content, path)` draws a file of that name, or of a longer one that begins with it."""

_NOT_DRAWN = (
    "ethernet_overlap",
    "frontier_longer_mini",
    "frontier_longer_text",
    "frontier_muon_text",
    "frontier_outer_mini",
    "frontier_zero-one_text",
)
"""Results that are a table only."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        output = options.output or options.results
        check_writable(output, "--output")
        for name in options.names or _recorded(options.results):
            _redraw(options.results / f"{name}.json", output / f"{name}.png")
    except InputError as error:
        return refuse("experiments.redraw", error)
    return 0


def drawing_of(name: str) -> Drawing | None:
    """What draws the results of that name; None for results without a picture."""
    known = [one for one in _DRAWN_BY if name == one or name.startswith(f"{one}_")]
    if not known or name in _NOT_DRAWN:
        return None
    drawing: Drawing = importlib.import_module(_DRAWN_BY[max(known, key=len)]).draw
    return drawing


def _recorded(results: Path) -> list[str]:
    """The names of all results there that have a picture."""
    names = sorted(path.stem for path in results.glob("*.json") if drawing_of(path.stem) is not None)
    if not names:
        raise InputError(f"--results {results} holds no results that have a picture: run an experiment first")
    return names


def _redraw(recorded: Path, picture: Path) -> None:
    draw = drawing_of(recorded.stem)
    if draw is None:
        raise InputError(f"{recorded.stem} has no picture; there are pictures of {', '.join(_DRAWN_BY)}")
    if not recorded.is_file():
        raise InputError(f"{recorded} does not exist: run the experiment first, or give --results FOLDER")
    try:
        draw(read_json(recorded), picture)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{recorded} does not hold what its picture shows ({error!r}): run the experiment again"
        ) from error
    print(f"Written: {picture}", flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.redraw", "Draws the pictures of recorded results again, from their JSON.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of results, for example ethernet; else all")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where their JSON lies")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the pictures; else beside the JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
