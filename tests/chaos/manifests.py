"""Manifests with values of other types and a good seal: an engine passes them over, or says why, with no weight moved,
and goes on from the checkpoint before."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.chaos.outcome import Outcome, is_documented
from tests.engine.tiny import make_engine, settings, train
from thinwire.command_line import main
from thinwire.engine import Engine
from thinwire.engine.checkpoint.manifest import _sealed

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 30, "warmup_num_steps": 5}}
OPTIMIZERS = {
    "OneBitAdam": {"lr": 1e-2, "freeze_step": 2},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 2},
    "ZeroOneAdam": {"lr": 1e-2},
    "AdamW": {"lr": 1e-2},
}
VALUES: list[Any] = [None, True, -1, 1.5, 10**30, float("inf"), "", "text", "1", [], [None], [[1]], {}, {"a": None}]


def run(count: int, seed: int) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        jobs = [_saved(Path(temporary) / name, name, stage) for name in OPTIMIZERS for stage in (0, 1)]
        for number in range(count):
            source = random.Random(f"{seed} {number}")
            engine, folder, whole = jobs[number % len(jobs)]
            body = json.loads(whole)
            del body["sha256"]
            where = _change(body, source)
            (folder / "newer" / "manifest.json").write_bytes(_sealed(body))

            def trial(engine: Engine = engine, folder: Path = folder, source: random.Random = source) -> str | None:
                return _load(engine, folder, source)

            if not outcome.attempt(f"seed {seed}, trial {number}, {folder.name} {where}", trial):
                break
    return outcome


def _saved(folder: Path, optimizer: str, stage: int) -> tuple[Engine, Path, bytes]:
    """A job with two checkpoints, and the manifest of the newer."""
    folder = folder.with_name(f"{optimizer}-{stage}")
    chosen = {"type": optimizer, "params": OPTIMIZERS[optimizer]}
    engine = make_engine(None, settings(stage, optimizer=chosen, scheduler=SCHEDULE))
    train(engine, range(3))
    engine.save_checkpoint(folder, "older")
    train(engine, range(3, 4))
    engine.save_checkpoint(folder, "newer", client_state={"epoch": 1})
    return engine, folder, (folder / "newer" / "manifest.json").read_bytes()


def _change(body: dict[str, Any], source: random.Random) -> str:
    """Put another value, or none, in one place; where and what."""
    place, inner = "", body
    while True:
        key = source.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
        place = f"{place}.{key}"
        below = inner[key]
        if not (isinstance(below, dict | list) and below and source.random() < 0.85):
            break
        inner = below
    if isinstance(inner, dict) and source.random() < 0.15:
        del inner[key]
        return f"without {place}"
    inner[key] = source.choice([value for value in VALUES if type(value) is not type(below) or source.random() < 0.2])
    return f"{place} = {inner[key]!r}"


def _load(engine: Engine, folder: Path, source: random.Random) -> str | None:
    """Load; what was wrong, an error's own traceback among it."""
    before = engine.module.mix.weight.detach().clone()
    tag = source.choice((None, "newer"))
    try:
        engine.load_checkpoint(folder, tag)
    except Exception as error:
        if not is_documented(error):
            raise
        if not torch.equal(engine.module.mix.weight, before):
            return f"weights had moved when it was refused: {error}"
        if engine.load_checkpoint(folder, "older")[0] is None:
            return "the checkpoint before it was not loaded"
    for command in ("verify", "inspect"):
        with contextlib.redirect_stderr(io.StringIO()):
            main(["checkpoint", command, str(folder), "--tag", "newer"])
    return None
