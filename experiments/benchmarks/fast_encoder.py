"""What a sample costs a BERT that learns masked words of sentences: padded as most write it, compiled with batches
sorted by length, and with `thinwire.transformers.accelerate`. `--seeds` asks what the last learns beside the first.

Systems take turns in one process; each has a model of its own, from the same weights. Time is of the processor, which
other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import corpus_name, load
from experiments.tasks.masking import masked_batch
from experiments.tasks.sizes import SIZES, BertSize
from experiments.tasks.tokenizer import encode_each, train_tokenizer
from thinwire.transformers import accelerate

__all__ = ["main"]

_MODULE = "experiments.benchmarks.fast_encoder"
_PADDED, _COMPILED, _FAST = "padded", "compiled, sorted", "thinwire"
_LENGTH, _POOL = 512, 32  # tokens of the longest sentence kept; batches among which lengths are sorted
_RATE = 1e-4
_WARM_UP = 4  # steps that compile and allocate, not timed
_LEARNING_RATE, _STEPS, _HELD_OUT = 5e-4, 500, 640  # of what is learned; sentences that tell its loss

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class _Sentences:
    vocabulary: int
    tokens: list[NDArray[np.int64]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
        sentences = _sentences(options.corpus, options.vocab_size)
    except InputError as error:
        return refuse(_MODULE, error)
    torch.set_num_threads(options.threads)
    lengths = np.array([len(one) for one in sentences.tokens])
    corpus = {
        "name": corpus_name(options.corpus),
        "vocabulary": sentences.vocabulary,
        "sentences": len(lengths),
        "tokens": {"mean": float(lengths.mean()), "median": float(np.median(lengths)), "longest": int(lengths.max())},
    }
    print(f"{corpus}\n{'BERT-':8} {'':18} {'CPU ms a sample':>15} {'times ' + _PADDED:>14} {'loss':>8}")
    results = []
    for size in options.sizes:
        for row in _measure(SIZES[size], sentences, options):
            results.append({"size": size, **row})
            print(
                f"{size:8} {row['name']:18} {row['milliseconds']:15.2f} {row['speed']:13.2f}x {row['first_loss']:8.4f}",
                flush=True,
            )
    learned = []
    for seed, size in itertools.product(range(options.seeds), options.sizes):
        losses = {name: _learn(SIZES[size], sentences, seed, options, name) for name in (_PADDED, _FAST)}
        learned.append({"size": size, "seed": seed, **losses})
        print(f"{size:8} seed {seed}: {losses}, {losses[_FAST] / losses[_PADDED] - 1:+.2%}", flush=True)
    write_json(
        options.output,
        {
            "learned": {"steps": _STEPS, "dropout": options.dropout, "losses": learned},
            "machine": describe(),
            "corpus": corpus,
            "batch": options.batch_size,
            "threads": options.threads,
            "results": results,
        },
    )
    return 0


def _model(size: BertSize, sentences: _Sentences, seed: int, dropout: float) -> BertForMaskedLM:
    torch.manual_seed(seed)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=sentences.vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            max_position_embeddings=_LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _learn(size: BertSize, sentences: _Sentences, seed: int, options: argparse.Namespace, name: str) -> float:
    """The loss on sentences held out, of a model trained on the others."""
    model = _model(size, sentences, seed, options.dropout).train()
    if name == _FAST:
        accelerate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, _STEPS, pct_start=0.1)
    random, held = np.random.default_rng(seed), min(_HELD_OUT, len(sentences.tokens) // 5)
    for _ in range(_STEPS):
        chosen = random.choice(len(sentences.tokens) - held, options.batch_size)
        model(**_batch([sentences.tokens[one] for one in chosen], sentences.vocabulary)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    total, count = 0.0, 0
    for start in range(len(sentences.tokens) - held, len(sentences.tokens), options.batch_size):
        batch = _batch(sentences.tokens[start : start + options.batch_size], sentences.vocabulary)
        labels = int((batch["labels"] != -100).sum())
        with torch.no_grad():
            total += labels * float(model.eval()(**batch).loss)
        count += labels
    return total / count


def _measure(size: BertSize, sentences: _Sentences, options: argparse.Namespace) -> list[dict[str, Any]]:
    plain = _model(size, sentences, 0, options.dropout)
    compiled = copy.deepcopy(plain)
    compiled.compile(dynamic=True)
    steps = {_PADDED: _step(copy.deepcopy(plain)), _COMPILED: _step(compiled), _FAST: _step(accelerate(plain), True)}
    for system in options.without:
        del steps[system]
    steps_each = _WARM_UP + options.rounds
    random_batches = _batches(sentences, options.batch_size, steps_each, sort=False)
    sorted_batches = _batches(sentences, options.batch_size, steps_each, sort=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for number, (one, other) in enumerate(zip(random_batches, sorted_batches, strict=True)):
        for name, step in steps.items():
            seconds, loss = step(other if name == _COMPILED and number else one)  # the first loss is of one batch
            losses.setdefault(name, loss)
            if number >= _WARM_UP:
                times[name].append(seconds)
    totals = {name: sum(seconds) / len(seconds) for name, seconds in times.items()}
    return [
        {
            "name": name,
            "milliseconds": 1e3 * totals[name] / options.batch_size,
            "median_milliseconds": 1e3 * median(times[name]) / options.batch_size,
            "speed": totals[_PADDED] / totals[name],
            "first_loss": losses[name],
        }
        for name in steps
    ]


def _step(model: nn.Module, fused: bool = False) -> Callable[[Batch], tuple[float, float]]:
    """What trains a step and gives its processor seconds and its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=fused or None)

    def step(batch: Batch) -> tuple[float, float]:
        torch.manual_seed(0)
        started = time.process_time()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started, float(loss.detach())

    return step


def _sentences(corpus: Sequence[Path] | None, vocabulary: int) -> _Sentences:
    """Of the texts, each within [CLS] and [SEP]."""
    documents = load(corpus).training
    lines = [line.strip() for text in documents for line in re.split(r"(?<= [.!?]) |\n", text) if line.strip()]
    tokenizer = train_tokenizer(lines, vocabulary)
    return _Sentences(tokenizer.get_vocab_size(), encode_each(tokenizer, lines, _LENGTH))


def _batches(sentences: _Sentences, size: int, count: int, *, sort: bool) -> list[Batch]:
    """`count`, padded to the longest of each; of the same sentences, sorted or not."""
    random = np.random.default_rng(0)
    chosen = random.choice(len(sentences.tokens), size * count)
    if sort:
        pools = np.array_split(chosen, max(1, count // _POOL))
        ordered = [sorted(pool, key=lambda one: len(sentences.tokens[one])) for pool in pools]
        chosen = np.concatenate(ordered)
    batches = [
        _batch([sentences.tokens[one] for one in part], sentences.vocabulary) for part in chosen.reshape(-1, size)
    ]
    return [batches[one] for one in random.permutation(len(batches))] if sort else batches


def _batch(tokens: Sequence[NDArray[np.int64]], vocabulary: int) -> Batch:
    return masked_batch(tokens, vocabulary, np.random.default_rng(0), max(map(len, tokens)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Times a step of BERT on sentences with and without padding.", "minutes")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["mini", "small"])
    parser.add_argument("--batch-size", type=positive, default=32, help="sentences")
    parser.add_argument("--rounds", type=positive, default=32, help="steps of each system")
    parser.add_argument("--seeds", type=int, default=0, help="of 500 steps of learning, padded and fast, after that")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--corpus", nargs="+", type=Path, help="text files; default: Python's standard library")
    parser.add_argument("--vocab-size", type=positive, default=16384, help="most tokens to learn")
    parser.add_argument("--without", nargs="+", choices=[_COMPILED], default=[], help="leave out")
    parser.add_argument("--output", type=Path, default=OUTPUT / "fast_encoder.json", help="the JSON file")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
