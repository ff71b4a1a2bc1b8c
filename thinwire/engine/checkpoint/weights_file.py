"""The model's weights in 16 bits, for the world outside: what is there stays until the new file is whole."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.engine.checkpoint.sharded_files import write_state_dict
from thinwire.engine.checkpoint.tensor_file import TensorToWrite

__all__ = ["in_16_bits", "write_weights"]

_LARGEST_FILE = 50 * 10**9
_ONCE_EACH = ".safetensors"


def write_weights(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str], comm: Communicator) -> bool:
    """Rank 0 writes its `tensors` under the name `path`; whether that went well, on every rank. Collective.

    fp32 values become bf16. A name that ends with .safetensors asks for that format, which leaves tied names out, as
    safetensors.torch.save_model does; any other for torch.save's. Above 50 GB there are several files, with an index.
    """
    problem = b""
    if comm.rank == 0:
        same = {} if path.suffix == _ONCE_EACH else {alias: name for alias, name in tied.items() if name in tensors}
        try:
            halves = {name: TensorToWrite.of(in_16_bits(tensor)) for name, tensor in tensors.items()}
            write_state_dict(path.parent, path.name, halves, same, _LARGEST_FILE)
        except (OSError, RuntimeError) as error:  # torch.save has RuntimeError for a full disk
            problem = f"{getattr(error, 'strerror', None) or error}".encode()
            warnings.warn(
                f"the model could not be written to {path}: {problem.decode()}. A file that was there before stays",
                RuntimeWarning,
                stacklevel=4,
            )
    return not comm.all_gather_bytes(problem, "export weights")[0]


def in_16_bits(tensor: Tensor) -> Tensor:
    """What is written of a tensor: of fp32 and fp64 values bf16, all others as they are."""
    return tensor.bfloat16() if tensor.dtype in (torch.float32, torch.float64) else tensor
