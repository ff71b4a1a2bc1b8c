"""What an answer of BERT-base and a token of GPT-2 small cost in 8 bits, beside Hugging Face in fp32.

Both are trained here for a few steps: the encoder to tell texts apart by a sentence, the decoder on a few hundred
tokens, from which its prompts are, as without training greedy choices are between near ties. Systems take turns in one
process; time is of the processor, which other work on the machine hardly changes. Latency is of the clock.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from experiments.common.command_line import Parser, positive
from experiments.common.errors import InputError, refuse
from experiments.common.machine import describe
from experiments.common.results import OUTPUT, check_writable, write_json
from experiments.tasks.corpus import corpus_name
from experiments.tasks.passages import read_texts
from experiments.tasks.sizes import SIZES, BertSize
from experiments.tasks.tokenizer import CLS, PAD, SEP, train_tokenizer
from thinwire.inference import Prepared, prepare
from thinwire.transformers import accelerate, undo

__all__ = ["main"]

_MODULE = "experiments.benchmarks.inference"
_LENGTH, _BATCH = 512, 32  # tokens of the longest sentence kept; sentences of a padded batch
_VOCABULARY, _GPT2 = 8192, 50257  # most tokens to learn; rows of GPT-2's head, whose cost counts
_POOL, _PROMPT, _NEW = 512, 32, 32  # tokens that the decoder learns, of a prompt, and of an answer
_WINDOW = 64  # tokens that the decoder learns at once
_LOAD = 0.8
_RATES = {"encoder": 1e-4, "decoder": 5e-4}
_TEST_EVERY = 5  # one sentence in this many is held out


@dataclass(frozen=True)
class _Text:
    """Sentences [tokens] in a fixed random order with the texts they are from, and the first text's first tokens."""

    sentences: list[list[int]]
    labels: list[int]
    classes: list[str]
    vocabulary: int
    run: Tensor

    def part(self, test: bool) -> list[int]:
        return [one for one in range(len(self.labels)) if (one % _TEST_EVERY == 0) == test]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints tables and writes JSON; the exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        check_writable(options.output.parent, "--output")
        text = _read(options.corpus)
    except InputError as error:
        return refuse(_MODULE, error)
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {"machine": describe(), "threads": options.threads, "size": options.size}
    found["corpus"] = {"name": corpus_name(options.corpus), "classes": text.classes, "sentences": len(text.labels)}
    if "encoder" not in options.without:
        found["encoder"] = _encoder(text, options)
        print(found["encoder"], flush=True)
    if "decoder" not in options.without:
        found["decoder"] = _decoder(text, options)
        print(found["decoder"], flush=True)
    write_json(options.output, found)
    return 0


def _encoder(text: _Text, options: argparse.Namespace) -> dict[str, Any]:
    model = _trained(_classifier(SIZES[options.size], text), "encoder", lambda one: _classes(text, one), options)
    undo(model)
    fast = prepare(model, quantize="int8-dynamic")
    systems: dict[str, Callable[[list[int]], list[int]]] = {
        "Hugging Face, fp32, padded": lambda chosen: _padded(model, text, chosen),
        "thinwire, int8-dynamic, queue": lambda chosen: _queued(fast, text, chosen),
    }
    chosen = text.part(test=True)[: options.rounds * options.sentences]
    seconds, right = dict.fromkeys(systems, 0.0), dict.fromkeys(systems, 0)
    for system in systems.values():
        system(chosen[:2])
    waited = 0.0
    for start in range(0, len(chosen), options.sentences):
        part = chosen[start : start + options.sentences]
        for name, system in systems.items():
            began, used = time.perf_counter(), time.process_time()
            answers = system(part)
            seconds[name] += time.process_time() - used
            waited += (time.perf_counter() - began) * (name == "thinwire, int8-dynamic, queue")
            right[name] += sum(one == text.labels[at] for one, at in zip(answers, part, strict=True))
        print(f"{start + len(part):5} sentences, CPU s {[round(one, 1) for one in seconds.values()]}", flush=True)
    plain = seconds["Hugging Face, fp32, padded"]
    return {
        "sentences": len(chosen),
        "tokens": sum(len(text.sentences[one]) for one in chosen),
        "systems": [
            {
                "name": name,
                "sentences_per_second": len(chosen) / seconds[name],
                "speed": plain / seconds[name],
                "accuracy": right[name] / len(chosen),
            }
            for name in systems
        ],
        "latency": _latency(fast, text, chosen[: options.requests], _LOAD * len(chosen) / waited),
    }


def _latency(model: Prepared, text: _Text, chosen: list[int], rate: float) -> dict[str, float]:
    """Milliseconds of answers to requests that come by chance, `rate` of them a second."""
    random = np.random.default_rng(0)
    done: dict[int, float] = {}
    begun: dict[int, float] = {}
    with model.queue() as queue:
        for one in chosen:
            time.sleep(random.exponential(1 / rate))
            begun[one] = time.perf_counter()
            answer = queue.submit(text.sentences[one])
            answer.add_done_callback(lambda _, one=one: done.__setitem__(one, time.perf_counter()))
    taken = [1e3 * (done[one] - begun[one]) for one in chosen]
    return {
        "requests": len(chosen),
        "requests_per_second": rate,
        "p50_milliseconds": float(np.percentile(taken, 50)),
        "p99_milliseconds": float(np.percentile(taken, 99)),
    }


def _decoder(text: _Text, options: argparse.Namespace) -> list[dict[str, Any]]:
    size = SIZES[options.size]
    config = GPT2Config(
        vocab_size=_GPT2,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = _trained(GPT2LMHeadModel(config), "decoder", lambda _: _windows(text, 2, _WINDOW, labels=True), options)
    fast = prepare(model, quantize="int8-dynamic")
    systems: dict[str, Any] = {"Hugging Face, fp32": model, "thinwire, int8-dynamic": fast}
    rows = []
    for batch in (1, 8):
        seconds, same = dict.fromkeys(systems, 0.0), []
        for _ in range(options.rounds):
            prompts = _windows(text, batch, _PROMPT)
            answers = []
            for name, system in systems.items():
                used = time.process_time()
                answers.append(system.generate(**prompts, max_new_tokens=_NEW, do_sample=False)[:, _PROMPT:])
                seconds[name] += time.process_time() - used
            same.append(float((answers[0] == answers[1]).float().mean()))
        tokens = options.rounds * batch * _NEW
        rows.append(
            {
                "batch": batch,
                "tokens_per_second": {name: tokens / one for name, one in seconds.items()},
                "speed": seconds["Hugging Face, fp32"] / seconds["thinwire, int8-dynamic"],
                "same_greedy_tokens": float(np.mean(same)),
            }
        )
    return rows


def _trained(model: Any, name: str, batch: Callable[[int], dict[str, Tensor]], options: argparse.Namespace) -> Any:
    """`model` after its steps, or as `--weights` has it from before."""
    kept: Path | None = options.weights and options.weights / f"{name}_{options.size}.pt"
    if kept is not None and kept.is_file():
        model.load_state_dict(torch.load(kept))
        return model.eval()
    steps = options.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATES[name], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, (at + 1) / 5, (steps - at) / steps * 2))
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"{name} step {step + 1} of {steps}: loss {float(loss.detach()):.3f}", flush=True)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    return model.eval()


def _classifier(size: BertSize, text: _Text) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=text.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(text.classes),
    )
    return accelerate(BertForSequenceClassification(config))


def _classes(text: _Text, step: int) -> dict[str, Tensor]:
    """Sixteen sentences to learn from."""
    part = text.part(test=False)
    chosen = [part[one % len(part)] for one in range(16 * step, 16 * step + 16)]
    return {**_batch(text, chosen), "labels": torch.tensor([text.labels[one] for one in chosen])}


def _windows(text: _Text, count: int, length: int, *, labels: bool = False) -> dict[str, Tensor]:
    starts = torch.randint(0, len(text.run) - length + 1, (count,)).tolist()
    tokens = torch.stack([text.run[start : start + length] for start in starts])
    return (
        {"input_ids": tokens, "labels": tokens} if labels else {"input_ids": tokens, "attention_mask": tokens * 0 + 1}
    )


def _batch(text: _Text, chosen: list[int]) -> dict[str, Tensor]:
    rows = [torch.tensor(text.sentences[one]) for one in chosen]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return {"input_ids": padded, "attention_mask": (padded != PAD).long()}


@torch.inference_mode()
def _padded(model: Any, text: _Text, chosen: list[int]) -> list[int]:
    parts = [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]
    return [one for part in parts for one in model(**_batch(text, part)).logits.argmax(dim=1).tolist()]


def _queued(model: Prepared, text: _Text, chosen: list[int]) -> list[int]:
    with model.queue() as queue:
        answers = [queue.submit(text.sentences[one]) for one in chosen]
    return [int(one.result()["logits"].argmax()) for one in answers]


def _read(corpus: Sequence[Path] | None) -> _Text:
    texts = read_texts(corpus)
    lines = {
        name: [line.strip() for line in re.split(r"(?<= [.!?]) |\n", text) if line.strip()]
        for name, text in texts.items()
    }
    tokenizer = train_tokenizer([line for one in lines.values() for line in one], _VOCABULARY)
    random, least = np.random.default_rng(0), min(map(len, lines.values()))
    pairs = [(line, label) for label, one in enumerate(lines.values()) for line in random.permutation(one)[:least]]
    order = random.permutation(len(pairs))
    encoded = tokenizer.encode_batch_fast([str(pairs[one][0]) for one in order], add_special_tokens=False)
    run = tokenizer.encode(next(iter(texts.values()))[: 8 * _POOL], add_special_tokens=False).ids
    if len(run) < _WINDOW:
        raise InputError(f"--corpus: its first text has {len(run)} tokens, and the decoder learns windows of {_WINDOW}")
    return _Text(
        [[CLS, *one.ids[: _LENGTH - 2], SEP] for one in encoded],
        [pairs[one][1] for one in order],
        list(texts),
        tokenizer.get_vocab_size(),
        torch.tensor(run[:_POOL]),
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(_MODULE, "Times answers of an encoder and tokens of a decoder in 8 bits.", "half an hour")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--corpus", nargs="+", type=Path, help="text files; default: Python's standard library")
    parser.add_argument("--steps", type=positive, default=40, help="of training, each model")
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each system")
    parser.add_argument("--sentences", type=positive, default=64, help="of a turn")
    parser.add_argument("--requests", type=positive, default=200, help="for latency")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--weights", type=Path, help="a folder that keeps the trained models")
    parser.add_argument("--without", nargs="+", choices=["encoder", "decoder"], default=[], help="leave out")
    parser.add_argument("--output", type=Path, default=OUTPUT / "inference.json", help="the JSON file")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
