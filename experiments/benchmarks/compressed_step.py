"""How long steps take whose gradients travel in four bits or one, beside DDP in bf16 with the same optimizer: on one
machine, where no link makes anybody wait.

    python -m experiments.benchmarks.compressed_step --ranks 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.benchmarks.engine_step_time import RATE, bert, engine_step, take_turns, torch_step
from experiments.common.command_line import Parser, positive
from experiments.common.launching import launch
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.sizes import SIZES
from thinwire.comm import Communicator
from thinwire.optim.muon import is_hidden_matrix

__all__ = ["main"]

_MODULE = "experiments.benchmarks.compressed_step"
_ADAMW, _MUON = "DDP in bf16, fused AdamW", "DDP in bf16, torch's Muon"


class _TorchMuon:
    """torch.optim.Muon of hidden matrices, and fused AdamW of the rest."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        held: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, one in named:
            held[is_hidden_matrix(one, name)].append(one)
        matrices = torch.optim.Muon(held[True], lr=RATE, adjust_lr_fn="match_rms_adamw")  # type: ignore[attr-defined]
        self._both = matrices, torch.optim.AdamW(held[False], lr=RATE, fused=True)

    def step(self) -> None:
        for one in self._both:
            one.step()

    def zero_grad(self) -> None:
        for one in self._both:
            one.zero_grad()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes JSON; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch(_MODULE, _parse, _measure, given, 2)


def _measure(comm: Communicator, options: argparse.Namespace) -> None:
    milliseconds = take_turns(_systems(options, comm), options, comm)
    if comm.rank:
        return
    ratios = {
        name: np.quantile(np.divide(times, milliseconds[_MUON if "Muon" in name else _ADAMW]), [0.25, 0.5, 0.75])
        for name, times in milliseconds.items()
    }
    print(f"{'':32} {'ms a step':>10} {'of DDP in bf16':>15} {'quartiles':>14}")
    for name, (low, middle, high) in ratios.items():
        print(f"{name:32} {np.median(milliseconds[name]):10.1f} {middle:15.3f} {low:6.3f}-{high:6.3f}")
    found = {name: one.tolist() for name, one in ratios.items()}
    measured = {"machine": describe(), "model": options.model, "ranks": comm.size, "sequences": options.batch_size}
    write_json(options.output, {**measured, "milliseconds": milliseconds, "ratios_to_ddp": found})


def _systems(options: argparse.Namespace, comm: Communicator) -> dict[str, Callable[[Any], None]]:
    """What takes a step, by its name; each after the DDP that it is compared with."""

    def engine(kind: str, **config: Any) -> Callable[[Any], None]:
        more = {"ns_dtype": "bf16"} if "Muon" in kind else {}  # as torch's
        if kind in ("AdamW", "Muon"):
            more["fused"] = True
        config["optimizer"] = {"type": kind, "params": {"lr": RATE, **more}}
        config["train_micro_batch_size_per_gpu"] = options.batch_size
        return engine_step(bert(options.model), config, comm)

    named = bert(options.model)
    return {
        _ADAMW: torch_step(bert(options.model), lambda held: torch.optim.AdamW(held, lr=RATE, fused=True), bf16=True),
        "AdamW, int4": engine("AdamW", communication_codec="int4"),
        _MUON: torch_step(named, lambda _: _TorchMuon(named.named_parameters()), bf16=True),
        "Muon, int4": engine("Muon", communication_codec="int4"),
        "1-bit Muon": engine("OneBitMuon"),
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Measures steps through codecs beside DDP's in bf16.", "minutes")
    parser.add_argument("--model", choices=tuple(SIZES), default="small", help="which BERT")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences a rank")
    parser.add_argument("--rounds", type=positive, default=12, metavar="N", help="turns of every system")
    parser.add_argument("--ranks", type=positive, metavar="N", help="else the launcher's, or 2")
    parser.add_argument("--output", type=Path, default=OUTPUT / "compressed_step.json", help="the JSON file")
    options = parser.parse_args(arguments)
    check_writable(options.output.parent, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
