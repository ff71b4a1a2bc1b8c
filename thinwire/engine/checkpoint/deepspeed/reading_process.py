"""The process that opens DeepSpeed's pickles, and does nothing else: `python -m` runs it with a list of files.

It gets a line of JSON, the folder to write to and the files to read, and answers with a line for each file: the tree
of its values, with the safetensors file of its tensors, or what is wrong with it.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.stand_ins import stand_ins
from thinwire.engine.checkpoint.deepspeed.trees import encode
from thinwire.engine.checkpoint.tensor_file import TensorToWrite, write_tensors

__all__ = ["read_pickle"]


def read_pickle(path: Path, output: Path) -> dict[str, Any]:
    """Write a pickle's tensors to `output`; {"tree"} of its values, or {"fault"}, what is wrong with it."""
    kept: dict[str, Tensor] = {}
    known: dict[tuple[Any, ...], str] = {}

    def key_of(tensor: Tensor) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"it holds a tensor of layout {tensor.layout}, which no checkpoint here can hold")
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        key = known.setdefault(place, str(len(kept))) if tensor.numel() else str(len(kept))
        kept.setdefault(key, tensor.detach())
        return key

    try:
        tree = encode(_load(path), key_of)
    except pickle.UnpicklingError as error:
        return {"fault": _refused(str(error))}
    except Exception as error:  # whatever a file can bring a loader to
        return {"fault": _first_line(error)}
    try:
        write_tensors(output, {key: TensorToWrite.of(tensor) for key, tensor in kept.items()})
    except (OSError, KeyError) as error:
        return {"fault": f"its tensors could not be written to {output.parent}: {_first_line(error)}"}
    return {"tree": tree}


def _load(path: Path) -> Any:
    with torch.serialization.safe_globals(stand_ins()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old forms of storage
        # From a map of the file: a tensor needs memory when it is written, and one at a time.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _refused(message: str) -> str:
    """torch's message without its advice to load with weights_only=False, which would run whatever the file holds."""
    for line in message.splitlines():
        marked = line.partition("GLOBAL ")[2]
        if marked:
            name = marked.split(" ")[0]
            return (
                f"it holds a {name}, which is not among the classes that are read from such files. Save again without "
                "it, or ask for it to be added"
            )
    return f"it is no file of torch.save, or it is damaged: {message.splitlines()[0] if message else ''}"


def _answers(request: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for number, path in enumerate(request["files"]):
        output = Path(request["folder"]) / f"{number}.safetensors"
        yield {**read_pickle(Path(path), output), "tensors": str(output)}


def main() -> None:
    """Answer the request on standard input."""
    for answer in _answers(json.loads(sys.stdin.readline())):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
