"""Configurations that somebody has damaged: each loads, or is a ConfigError that is short and names a key.

Valid configurations of every optimizer, schedule and layout are mutated, as objects and as the text of a file. The
seed decides everything. A text that is strict JSON loads as the object that this is, or not, and none takes long.
"""

import copy
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.harness import Trial, over_seeds
from thinwire.engine.config import ConfigError, EngineConfig, load_config

_LONGEST_MESSAGE = 4000
_LONGEST_SECONDS = 10.0  # ten times what any takes; what grows as the square of its length takes hours
_LARGEST_FILE = 1 << 20
_RANKS = (1, 2, 3, 8)

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "adam_w_mode": False, "amsgrad": False},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.1},
    "Rprop": {"lr": 0.1, "etas": [0.5, 1.2], "step_sizes": [1e-6, 50]},
    "OneBitAdam": {"lr": 0.1, "freeze_step": 3, "betas": [0.9, 0.9], "block_size": 64, "eps": 1e-8},
    "OneBitLamb": {"lr": 0.1, "freeze_step": 3, "max_coeff": 10, "min_coeff": 0.1, "factor_threshold": 0.1},
    "ZeroOneAdam": {"lr": 0.1, "var_freeze_step": 3, "var_update_scaler": 3, "local_step_clipper": 3},
    "OneBitLion": {"lr": 0.1, "betas": [0.9, 0.9]},
}

_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 10, "warmup_type": "log"},
    "WarmupDecayLR": {"total_num_steps": 100, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 100, "warmup_num_steps": 3, "cos_min_ratio": 0.1},
    "LRRangeTest": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 0.2, "cycle_momentum": True, "decay_step_size": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "MultiStepLR": {"milestones": [1, 2], "gamma": 0.5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
}

_LAYOUTS: list[dict[str, Any]] = [
    {"mode": "fixed", "block": 16, "num_local_blocks": 4, "num_global_blocks": 1, "attention": "bidirectional"},
    {"mode": "bigbird", "block": 32, "num_random_blocks": 1, "num_sliding_window_blocks": 3, "seed": 2},
    {"mode": "variable", "block": 16, "local_window_blocks": [4], "global_block_indices": [0]},
    {"mode": "bslongformer", "block": 64, "global_block_indices": [0], "global_block_end_indices": [1]},
    {"mode": "local", "block": 128, "num_sliding_window_blocks": 3},
]

_REST: dict[str, Any] = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 1,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "reduce_scatter": True},
    "gradient_clipping": 1.0,
    "activation_checkpointing": {"modules": ["Layer"], "cpu_checkpointing": True},
    "progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.001},
    "steps_per_print": 10,
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "job"},
    "checkpoint": {"keep_last": 3, "async_save": True},
    "seed": 3,
    "thinwire": {},
    "wandb": {"enabled": False},
}


@over_seeds
@contextmanager
def run() -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as folder:
        yield lambda seed: filter(None, [_try_one(random.Random(seed), Path(folder, "config.json"))])


@over_seeds
@contextmanager
def texts() -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as folder:
        yield lambda seed: filter(None, [_try_text(random.Random(seed), Path(folder, "config.json"))])


def _try_one(generator: random.Random, path: Path) -> str | None:
    """Why this one ended as none may; None where it did not."""
    tree = _valid(generator)
    ranks = generator.choice(_RANKS)
    keys = {key for _, key in _places(tree)}
    damaged: Any = tree
    if generator.random() < 0.4:
        path.write_bytes(_damage_text(json.dumps(tree, indent=generator.choice([None, 1])), generator))
        damaged = path
    else:
        places = list(_places(tree))
        for section, key in generator.sample(places, generator.randint(1, 3)):
            keys |= _damage_tree(tree, section, key, generator)
    try:
        config = load_config(damaged, ranks)
    except ConfigError as error:
        return _fault_of(str(error), keys, str(path) if damaged is path else "")
    except BaseException as error:  # a crash in native code aside, nothing else may come out
        return f"{type(error).__name__}: {str(error)[:100]}"
    return _fault_of_loaded(config, ranks)


def _fault_of(message: str, keys: set[str], path: str) -> str | None:
    """A message is short, and names a key, or the place in a file that is no JSON."""
    if len(message) > _LONGEST_MESSAGE:
        return f"a message of {len(message)} characters: {message[:60]}"
    names_a_key = any(key and key[:60] in message for key in keys) or "batch size" in message
    names_a_place = bool(path) and path in message
    return None if names_a_key or names_a_place else f"names no key: {message[:100]}"


def _fault_of_loaded(config: EngineConfig, ranks: int) -> str | None:
    """What loads is a whole configuration: JSON can hold it, and it loads again as the same."""
    try:
        text = json.dumps(config.describe(), allow_nan=False)
        again = load_config(json.loads(text), ranks)
    except Exception as error:
        return f"loaded, and then {type(error).__name__}: {str(error)[:100]}"
    return None if again == config else "loaded as another configuration the second time"


def _try_text(generator: random.Random, path: Path) -> str | None:
    content = json.dumps(_valid(generator), indent=generator.choice([None, 1])).encode()
    for _ in range(generator.randint(1, 4)):
        content = _edit(content, generator)
    path.unlink(missing_ok=True)
    if generator.random() < 0.02:
        os.mkfifo(path)
        content = b""
    else:
        path.write_bytes(content)
    begin = time.perf_counter()
    config, message = _outcome(path)
    if (seconds := time.perf_counter() - begin) > _LONGEST_SECONDS:
        return f"{len(content)} bytes take {seconds:.0f} s: {content[:60]!r}"
    if len(message) > _LONGEST_MESSAGE or not (config or str(path) in message):
        return f"a message of {len(message)} characters: {message[:60]}"
    if config is not None and (fault := _fault_of_loaded(config, 1)):
        return fault
    try:
        strict = _strict(content)
    except (ValueError, RecursionError):
        return None
    if len(content) > _LARGEST_FILE or config == (alone := _outcome(strict))[0]:
        return None
    return f"as a file: {config or message[:200]}; as a dict: {alone[0] or alone[1][:200]}"


def _outcome(source: Any) -> tuple[EngineConfig | None, str]:
    try:
        return load_config(source, 1), ""
    except ConfigError as error:
        return None, str(error)


def _strict(content: bytes) -> Any:
    """What JSON alone reads: each name once, and finite numbers. Raises ValueError."""

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(tree := dict(pairs)) < len(pairs):
            raise ValueError("a name is there twice")
        return tree

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError("an infinite number")
        return number

    read = json.loads(content.decode(), object_pairs_hook=each_once, parse_float=finite, parse_constant=finite)
    if not isinstance(read, dict):
        raise ValueError("no object")
    return read


# What is damaged


def _valid(generator: random.Random) -> dict[str, Any]:
    tree = copy.deepcopy(_REST)
    for key in generator.sample(sorted(_REST), generator.randint(0, 6)):
        if key != "train_batch_size":
            del tree[key]
    kind = generator.choice(sorted(_OPTIMIZERS))
    tree["optimizer"] = {"type": kind, "params": copy.deepcopy(_OPTIMIZERS[kind])}
    schedule = generator.choice(sorted(_SCHEDULES))
    tree["scheduler"] = {"type": schedule, "params": copy.deepcopy(_SCHEDULES[schedule])}
    if generator.random() < 0.3:
        tree["sparse_attention"] = copy.deepcopy(generator.choice(_LAYOUTS))
    return tree


def _places(tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key, with the object that it is in."""
    for key, value in tree.items():
        yield tree, key
        if isinstance(value, dict):
            yield from _places(value)


# As objects


def _nested(generator: random.Random) -> Any:
    value: Any = 1
    for _ in range(generator.choice([5, 17, 100, 3000])):
        value = {"a": value} if generator.random() < 0.5 else [value]
    return value


_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda generator: generator.choice([None, True, False, "", "auto", "x", "0", "true", "\x1b[31m", "é" * 50]),
    lambda generator: generator.choice([0, -1, 1, 3, 7, 2**31, 2**62, 2**63, -(2**64)]),
    lambda generator: generator.choice([0.0, -0.5, 0.5, 1.5, 1e18, 1e308, 5e-324, float("nan"), float("inf")]),
    lambda generator: generator.choice([10**400, -(10**5000), 10**19]),
    lambda generator: generator.choice([[], {}, [[]], [None], [0.5], [1, 2, 3], ["a"], {"a": 1}, {"enabled": []}]),
    lambda generator: generator.choice([b"bytes", (), (1, 2), {1: 2}, {None: 1}, object(), 1j, {1, 2}, range(3)]),
    lambda generator: generator.choice(["x", b"x", [0.5], "é"]) * generator.choice([1000, 100_000]),
    _nested,
)


def _damage_tree(tree: dict[str, Any], section: dict[str, Any], key: str, generator: random.Random) -> set[str]:
    """Change one thing in place; the keys that are new."""
    way = generator.choice(["replace", "replace", "replace", "remove", "misspell", "move", "itself"])
    if way == "replace":
        section[key] = generator.choice(_VALUES)(generator)
    elif way == "remove":
        section.pop(key, None)
    elif way == "misspell":
        wrong = _misspelt(key, generator)
        section[wrong] = section.pop(key, 1)
        return {wrong}
    elif way == "move":
        tree[key] = section.pop(key, 1)
    else:
        section[key] = tree
    return set()


def _misspelt(key: str, generator: random.Random) -> str:
    place = generator.randrange(len(key))
    return generator.choice([key[:place] + key[place + 1 :] or "x", key.upper() + "_", key * 2000, f"{key}\0", "é"])


# As text


_NUMBERS = ("NaN", "-Infinity", "1e400", "-1e400", "9" * 5000, "1" + "0" * 400, "01", "1.", "0x10", "-", "5e8")


def _damage_text(text: str, generator: random.Random) -> bytes:
    place = generator.randrange(len(text))
    way = generator.randrange(8)
    if way == 0:
        return text[:place].encode()
    if way == 1:
        return text[:place].encode() + generator.randbytes(generator.randint(1, 4)) + text[place:].encode()
    if way == 2:
        return text.replace("1", generator.choice(_NUMBERS), 1).encode()
    if way == 3:
        bracket, closing = generator.choice([("[", "]"), ('{"a": ', "}")])
        depth = generator.choice([10, 100, 10_000])
        return text.replace(": ", f': {bracket * depth}0{closing * depth}, "b": ', 1).encode()
    if way == 4:
        key = json.dumps(generator.choice(sorted(json.loads(text))))
        return text.replace("{", f"{{{key}: 1, ", 1).encode()
    if way == 5:
        return text.encode(generator.choice(["utf-16", "utf-8-sig", "utf-32"]))
    if way == 6:
        return (text + generator.choice([",", "}", "// done", "\0", " {}", "#"])).encode()
    return text.replace(
        '"', generator.choice(["'", '""', '"\\ud800', '"\\u0000']), generator.choice([1, 2, -1])
    ).encode()


_PIECES = (*b" \t\r\n\"'\\{}[],:#/*-+.eE019a", 0, 0x1B, 0x80, 0xFF)
_MORE_PIECES = (
    *(b"//", b"/*", b"*/", b"'''", b"\\u0000", b"\\ud800", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"1e400", b"NaN", b"auto"),
    *(b"true", b"null", b'"seed": 1,', b'{"a": ', b'"type": ', b"1e-400", b"5e8", b"0x1", b"#\n", b": [", b", "),
)


def _edit(content: bytes, generator: random.Random) -> bytes:
    """One edit of bytes, as hands, copies and broken disks make them."""
    first, last = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + generator.choice([1, 3, 20, 500]))
    piece = generator.choice([bytes([generator.choice(_PIECES)]), generator.choice(_MORE_PIECES)])
    many = generator.choice([1, 1, 1, 2, 40, 5000, 1 << 16, 1 << 19])
    inside = generator.choice(
        [
            b"",
            content[first:last] * 2,
            piece + content[first:last],
            piece * (many // len(piece) + 1),
            content[first:last] * (many // (last - first + 1) + 1),
            generator.randbytes(generator.randint(1, 8)),
        ]
    )
    return content[:first] + inside + content[last:]
