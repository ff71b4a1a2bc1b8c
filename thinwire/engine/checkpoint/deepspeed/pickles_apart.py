"""DeepSpeed's pickles, read by another process: whatever a file holds, what comes back is plain values and tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.trees import decode
from thinwire.engine.checkpoint.errors import CheckpointError
from thinwire.engine.checkpoint.regular_files import open_file
from thinwire.engine.checkpoint.tensor_reader import TensorReader

__all__ = ["Reader", "read_apart", "take_answers"]

Reader = Callable[[Sequence[Path], Path], list[Any]]
"""Reads files, with a folder for what it needs meanwhile; the values of each."""

_MODULE = "thinwire.engine.checkpoint.deepspeed.reading_process"
_PACKAGES = Path(__file__).parents[4]


def read_apart(files: Sequence[Path], folder: Path) -> list[Any]:
    """The values of each file, read in a process of its own; tensors are maps of files in `folder`.

    Raises CheckpointError, naming the file, for what cannot be read.
    """
    request = json.dumps({"folder": str(folder), "files": [str(path.absolute()) for path in files]})
    paths = os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", _MODULE],
        input=request + "\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) < len(files):
        how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CheckpointError(f"{files[len(answers)]} cannot be read: the process that reads it {how}: {last}")
    return take_answers(files, answers)


def take_answers(files: Sequence[Path], answers: Sequence[dict[str, Any]]) -> list[Any]:
    """The values that each answer of the reading process tells of. Raises CheckpointError for one that is a fault."""
    for path, answer in zip(files, answers, strict=True):
        if "fault" in answer:
            raise CheckpointError(f"{path} cannot be read: {answer['fault']}")
    return [decode(answer["tree"], _mapped(Path(answer["tensors"]))) for answer in answers]


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, as maps of it: they take memory where they are read."""
    descriptor = open_file(path)
    try:
        stored = TensorReader(descriptor).tensors
    finally:
        os.close(descriptor)
    content = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    tensors = {}
    for key, one in stored.items():
        run = content[one.offset : one.offset + one.numel * one.dtype.itemsize]
        tensors[key] = run.view(one.dtype).view(one.shape) if one.numel else torch.empty(one.shape, dtype=one.dtype)
    return tensors
