"""What a rank holds of a model's state at every ZeRO stage, by accounting over live tensors, beside the formulas.

`experiments.benchmarks.engine` starts it on its ranks: stage 3 needs processes.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common.command_line import Parser, positive
from experiments.common.launching import launch
from experiments.common.peak_memory import process_tensor_bytes
from experiments.common.results import write_json
from experiments.tasks.sizes import SIZES
from experiments.training.optimizers import COMPRESSED, OPTIMIZERS, engine_section
from thinwire import initialize
from thinwire.comm import Communicator
from thinwire.engine import Engine
from thinwire.zero.bucket_layout import frozen_state_formula, model_state_formula
from thinwire.zero.memory import live_tensor_bytes

__all__ = ["main", "measure"]

_VOCABULARY, _LENGTH, _SEQUENCES = 4096, 32, 2
_STEPS, _FREEZE_STEP, _RATE = 4, 2, 1e-4
_SYSTEMS = {
    f"stage {stage}, {OPTIMIZERS[optimizer].label}": (stage, optimizer)
    for optimizer, stages in (("adamw", (0, 1, 2, 3)), ("onebit-adam", (1, 2)))
    for stage in stages
}
"""ZeRO stage, and the optimizer; 1-bit Adam is measured frozen."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, on the ranks it asks for or a launcher started; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return launch("experiments.benchmarks.engine_memory", _parse, measure, given, 4)


def measure(comm: Communicator, options: argparse.Namespace) -> None:
    """Writes bytes of every system, of the rank that holds most, beside the formulas. Collective."""
    held = {name: _hold(options.model, *system, comm) for name, system in _SYSTEMS.items()}
    if comm.rank == 0:
        elements = sum(parameter.numel() for parameter in _model(options.model).parameters())
        content = {"ranks": comm.size, "dtype": "bf16", "elements": elements}
        write_json(options.output, {**content, "systems": held})


def _hold(model: str, stage: int, optimizer: str, comm: Communicator) -> dict[str, Any]:
    """Bytes by accounting over the process's live tensors: after a step, and before it, with what backward has left.

    `held` is what compares with the formula: after a step, or where that drops the gradients, at stage 3, before it.
    """
    gc.collect()
    # Counting walks through all objects but these: what was imported, and anything that was there before this system.
    gc.freeze()
    engine = _engine(model, stage, optimizer, comm)
    elements = sum(parameter.numel() for parameter in engine.module.parameters())
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        tokens = torch.randint(5, _VOCABULARY, (_SEQUENCES, _LENGTH), generator=generator)
        total, count = engine(tokens, tokens)
        engine.backward(total / count)
        del total, tokens
        if step == _STEPS - 1:
            gc.collect()
            after_backward = sum(process_tensor_bytes().values())
            by_category = live_tensor_bytes(engine.module, engine.optimizer)
        engine.step()
    after_step = sum(process_tensor_bytes().values())
    frozen = optimizer in COMPRESSED
    formula = frozen_state_formula(elements, comm.size) if frozen else model_state_formula(stage, elements, comm.size)
    every = torch.tensor([after_backward, after_step])
    comm.all_reduce(every, "max")
    engine.close()
    return {
        "held": int(every[0] if stage == 3 else every[1]),
        "after_backward": int(every[0]),
        "after_step": int(every[1]),
        "formula": sum(formula.values()),
        "by_category_after_backward": {category: nbytes for (category, _), nbytes in by_category.items()},
    }


def _engine(model: str, stage: int, optimizer: str, comm: Communicator) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": _SEQUENCES,
        "optimizer": engine_section(optimizer, _RATE, _FREEZE_STEP),
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    return initialize(model=_model(model), config=config, comm=comm)[0]


def _model(name: str) -> torch.nn.Module:
    from experiments.tasks.models import build_bert

    return build_bert(SIZES[name], _VOCABULARY, _LENGTH, 0.0, seed=0)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "experiments.benchmarks.engine_memory",
        "Measures what ranks hold at every ZeRO stage; experiments.benchmarks.engine starts it.",
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="small", help="which BERT")
    parser.add_argument("--ranks", type=positive, metavar="N", help="else the launcher's, or 4")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="for the measurements")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
