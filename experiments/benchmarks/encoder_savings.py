"""Whether the savings of layer drop, sparse attention and encoders without padding multiply: a training step of BERT on
documents of up to 1024 tokens with each, with every two and with all three.

Systems take turns in one process, from the same weights, on the same documents; those that drop layers drop the same
ones. Time is of the processor, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.masking import masked_batch
from experiments.tasks.sizes import SIZES, BertSize
from experiments.tasks.tokenizer import PAD, encode_each, train_tokenizer
from thinwire.pld import ProgressiveLayerDrop, drop_layers
from thinwire.sparse_attn import BigBird, sparsify
from thinwire.transformers import accelerate

__all__ = ["main"]

_MODULE = "experiments.benchmarks.encoder_savings"
_DROP, _SPARSE, _FAST = "layer drop", "sparse attention", "no padding"
_THETA, _SETTLED = 0.5, 50  # by which step the schedule is down at theta

Batch = dict[str, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
        vocabulary, documents = _documents(options)
    except InputError as error:
        return refuse(_MODULE, error)
    torch.set_num_threads(options.threads)
    batches = _batches(documents, vocabulary, options)
    tokens = sum(int(one["attention_mask"].sum()) for one in batches)
    padded = sum(one["attention_mask"].numel() for one in batches)
    print(f"{tokens:,} tokens, {100 * (1 - tokens / padded):.0f}% padding\n{'':42} CPU s a step    times  product")
    seconds = _measure(_systems(SIZES[options.size], vocabulary, options), batches)
    results = []
    for parts, spent in seconds.items():
        speed = seconds[()] / spent
        product = float(np.prod([seconds[()] / seconds[part,] for part in parts]))
        results.append({"with": list(parts), "seconds": spent, "speed": speed, "product_of_each": product})
        name = ", ".join(parts) or "plain"
        print(f"{name:42} {spent:12.2f} {speed:7.2f}x {product:7.2f}x")
    content: dict[str, Any] = {
        "machine": describe(),
        "corpus": corpus_name(options.corpus),
        "size": options.size,
        "length": options.length,
        "batch": options.batch_size,
        "threads": options.threads,
        "tokens": tokens,
        "padded": padded,
        "theta": _THETA,
        "results": results,
    }
    write_json(options.output, content)
    return 0


def _systems(
    size: BertSize, vocabulary: int, options: argparse.Namespace
) -> dict[tuple[str, ...], Callable[[Batch, int], float]]:
    """By what each has: what trains a step of that number, and gives its processor seconds."""
    torch.manual_seed(0)
    plain = RobertaPreLayerNormForMaskedLM(
        RobertaPreLayerNormConfig(
            vocab_size=vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            max_position_embeddings=options.length + PAD + 1,
            pad_token_id=PAD,
        )
    )
    parts = (_DROP, _SPARSE, _FAST)
    chosen = [some for count in range(4) for some in itertools.combinations(parts, count)]
    layout = BigBird(num_heads=size.heads, block=options.block)
    return {some: _step(copy.deepcopy(plain), some, layout) for some in chosen}


def _step(model: nn.Module, parts: tuple[str, ...], layout: BigBird) -> Callable[[Batch, int], float]:
    if _SPARSE in parts:
        sparsify(model, layout)
    if _FAST in parts:
        accelerate(model)
    schedule = ProgressiveLayerDrop(_THETA, gamma=1.0)
    if _DROP in parts:
        drop_layers(model, schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Batch, number: int) -> float:
        torch.manual_seed(0)
        schedule.update_state(_SETTLED + number)
        started = time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    return step


def _measure(
    systems: dict[tuple[str, ...], Callable[[Batch, int], float]], batches: list[Batch]
) -> dict[tuple[str, ...], float]:
    """Mean seconds a step; the first batch only compiles and allocates."""
    seconds: dict[tuple[str, ...], list[float]] = {parts: [] for parts in systems}
    for number, batch in enumerate(batches):
        for parts, step in systems.items():
            seconds[parts].append(step(batch, number))
    return {parts: float(np.mean(spent[1:])) for parts, spent in seconds.items()}


def _documents(options: argparse.Namespace) -> tuple[int, list[NDArray[np.int64]]]:
    """The vocabulary's size, and documents of at most so many tokens, each within [CLS] and [SEP]."""
    texts = load(options.corpus).training
    tokenizer = train_tokenizer(texts, options.vocab_size)
    return tokenizer.get_vocab_size(), encode_each(tokenizer, texts, options.length)


def _batches(documents: list[NDArray[np.int64]], vocabulary: int, options: argparse.Namespace) -> list[Batch]:
    random, steps = np.random.default_rng(0), options.rounds + 1
    chosen = ([documents[one] for one in random.choice(len(documents), options.batch_size)] for _ in range(steps))
    return [masked_batch(one, vocabulary, random, options.length) for one in chosen]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Times a step of BERT with layer drop, sparse attention and no padding.", "minutes")
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--length", type=positive, default=1024, help="most tokens of a document; batches have it")
    parser.add_argument("--batch-size", type=positive, default=4, help="documents")
    parser.add_argument("--rounds", type=positive, default=24, help="steps of each system")
    parser.add_argument("--block", type=positive, default=64, help="tokens of sparse attention's blocks")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--corpus", nargs="+", type=Path, help="text files; default: Python's standard library")
    parser.add_argument("--vocab-size", type=positive, default=16384, help="most tokens to learn")
    parser.add_argument("--output", type=Path, default=OUTPUT / "encoder_savings.json", help="the JSON file")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
