"""Turns a checkpoint into the one file that the rest of the world reads: model.safetensors, with whole parameters in
their own shapes, for Hugging Face's from_pretrained and for plain torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thinwire.engine.checkpoint.durable import sync_folder, write_whole
from thinwire.engine.checkpoint.reading import LoadedCheckpoint
from thinwire.engine.checkpoint.tensor_file import TensorToWrite, write_tensors

__all__ = ["WEIGHTS", "export_weights"]

WEIGHTS = "model.safetensors"


def export_weights(
    checkpoint: LoadedCheckpoint,
    output: Path,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
    tied: bool = False,
) -> Path:
    """Write `output`/model.safetensors, replacing one that is there, and return its path. One parameter at a time.

    Args:
        checkpoint: its fp32 master weights are written where there are any, else its weights, and its buffers.
        output: a folder, made if need be.
        dtype: what floating-point values are converted to; by default they stay as they are.
        config: a file to copy to `output`/config.json, which from_pretrained needs.
        tied: write a tied parameter again under its other names, for load_state_dict(strict=True). from_pretrained and
            safetensors.torch.load_model tie by themselves and expect it once.

    Raises OSError.
    """
    output.mkdir(parents=True, exist_ok=True)
    tensors = _parameters(checkpoint, dtype)
    if tied:
        tensors |= {alias: tensors[name] for alias, name in checkpoint.shared.get("tied", {}).items()}
    for name, buffer in checkpoint.buffers().items():
        tensors[name] = TensorToWrite.of(_converted(buffer, dtype))
    unfinished = output / f".{WEIGHTS}.{os.getpid()}.unfinished"
    unfinished.unlink(missing_ok=True)  # of a process of the same number that was killed
    try:
        write_tensors(unfinished, tensors)
        if config is not None:
            write_whole(output / "config.json", config.read_bytes())
        os.replace(unfinished, output / WEIGHTS)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(output)
    return output / WEIGHTS


def _parameters(checkpoint: LoadedCheckpoint, dtype: torch.dtype | None) -> dict[str, TensorToWrite]:
    tensors = {}
    for name, (shape, own_dtype) in checkpoint.model.parameters.items():
        kind = "master" if checkpoint.dtype_of("master", name) else "weight"
        held = checkpoint.dtype_of(kind, name) or own_dtype  # an empty parameter is in no file
        wanted = dtype if dtype is not None and held.is_floating_point else held
        tensors[name] = TensorToWrite(wanted, shape, partial(_read, checkpoint, kind, name, wanted))
    return tensors


def _read(checkpoint: LoadedCheckpoint, kind: str, name: str, dtype: torch.dtype) -> Tensor:
    return checkpoint.read(kind, name, 0, checkpoint.model.numel(name)).to(dtype)


def _converted(buffer: Tensor, dtype: torch.dtype | None) -> Tensor:
    return buffer.to(dtype) if dtype is not None and buffer.is_floating_point() else buffer
