"""The model as one safetensors file, for the world outside: what is there stays until the new one is whole."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.engine.checkpoint.durable import sync_folder
from thinwire.engine.checkpoint.tensor_file import TensorToWrite, write_tensors

__all__ = ["write_weights"]


def write_weights(path: Path, tensors: dict[str, Tensor], comm: Communicator) -> bool:
    """Rank 0 replaces the file `path` by one with `tensors`; whether that went well, on every rank. Collective."""
    problem = b""
    if comm.rank == 0:
        try:
            _replace(path, tensors)
        except OSError as error:
            problem = f"{error.strerror or error}".encode()
            warnings.warn(
                f"the model could not be written to {path}: {problem.decode()}. A file that was there before stays",
                RuntimeWarning,
                stacklevel=4,
            )
    return not comm.all_gather_bytes(problem, "export weights")[0]


@torch.no_grad()
def _replace(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)  # of a process of the same number that was killed
    try:
        write_tensors(unfinished, {name: TensorToWrite.of(tensor) for name, tensor in tensors.items()})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
