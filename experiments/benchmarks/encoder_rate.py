"""What share of the machine's matmul rate a training step of BERT reaches with `thinwire.transformers.accelerate`, and
where the rest of its time goes.

The machine's rate is that of the layers' own products alone, of as many tokens. Time is of the processor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.sizes import SIZES, BertSize
from thinwire.transformers import accelerate

__all__ = ["main"]

_MODULE = "experiments.benchmarks.encoder_rate"
_VOCABULARY, _LABELLED = 30522, 0.15
_KINDS = {
    "matrix products": ("aten::addmm", "aten::mm"),
    "head's loss": ("cross_entropy", "log_softmax", "nll_loss"),
    "attention": ("aten::bmm", "softmax", "flash_attention", "scaled_dot_product"),
    "activations": ("gelu", "tanh"),
    "layer norms": ("layer_norm",),
    "dropout": ("dropout", "bernoulli"),
    "optimizer": ("_fused_adamw", "Optimizer"),
    "sums, copies, zeros": ("aten::add", "aten::mul", "aten::sum", "aten::copy_", "aten::fill_", "aten::cat"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
    except InputError as error:
        return refuse(_MODULE, error)
    torch.set_num_threads(options.threads)
    size = SIZES[options.size]
    step, batch = _step(size, options)
    tokens = int(batch["attention_mask"].sum())
    with FlopCounterMode(display=False) as counter:
        step()
    flops = counter.get_total_flops()
    rates, seconds = [], []
    for _ in range(options.rounds):
        rates.append(_matmul_rate(size, tokens))
        seconds.append(_seconds(step))
    rate, spent = max(rates), min(seconds)
    share = flops / spent / rate
    print(f"BERT-{options.size}, {tokens} tokens of {batch['attention_mask'].numel()} with padding")
    print(f"matrix products alone {rate / 1e9:.1f} GFLOP/s; a step {flops / spent / 1e9:.1f}: {share:.2f} of it")
    parts = _breakdown(step)
    for name, part in parts.items():
        print(f"{name:20} {100 * part:5.1f}%")
    content: dict[str, Any] = {
        "machine": describe(),
        "size": options.size,
        "threads": options.threads,
        "tokens": tokens,
        "flops": flops,
        "seconds": spent,
        "matmul_flops_a_second": rate,
        "share": share,
        "time": parts,
    }
    write_json(options.output, content)
    return 0


def _step(size: BertSize, options: argparse.Namespace) -> tuple[Callable[[], None], dict[str, torch.Tensor]]:
    """What trains a step, and its batch: documents of random lengths."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
    )
    model = accelerate(BertForMaskedLM(config))
    lengths = torch.randint(options.length // 4, options.length + 1, (options.batch_size, 1))
    mask = torch.arange(options.length) < lengths
    ids = torch.randint(5, _VOCABULARY, mask.shape)
    labels = torch.where(mask & (torch.rand(mask.shape) < _LABELLED), ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, batch


def _matmul_rate(size: BertSize, tokens: int) -> float:
    """FLOP a second of what a layer multiplies, forward."""
    hidden, wide = torch.randn(tokens, size.width), torch.randn(tokens, 4 * size.width)
    up, down, square = (
        torch.randn(shape) for shape in ((wide.shape[1], size.width), (size.width, wide.shape[1]), (size.width,) * 2)
    )

    def products() -> None:
        for left, right in ((hidden, up), (wide, down), *[(hidden, square)] * 4):
            torch.nn.functional.linear(left, right)

    products()
    flops = 2 * tokens * (2 * size.width * wide.shape[1] + 4 * size.width**2)
    return flops / _seconds(products)


def _seconds(action: Callable[[], None]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def _breakdown(step: Callable[[], None]) -> dict[str, float]:
    """The parts of a step's processor time, by kinds of operations."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    spent: Counter[str] = Counter()
    for event in profiled.key_averages():
        spent[_kind(event.key)] += event.self_cpu_time_total
    total = sum(spent.values())
    return {name: time / total for name, time in spent.most_common()}


def _kind(operation: str) -> str:
    return next((kind for kind, names in _KINDS.items() if any(one in operation for one in names)), "other")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Compares a training step of BERT with the machine's matrix products.", "a minute")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--length", type=positive, default=256, help="of the longest document")
    parser.add_argument("--batch-size", type=positive, default=8, help="documents")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT / "encoder_rate.json", help="the JSON file")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
