"""DeepSpeed's pickles, opened by a process of its own: whatever a file holds, what comes back is plain values and
tensors.

It runs `main` and is given a line of JSON, the folder to write to and the files to read. It answers with a line
for each file: where its plain values were written to, or what is wrong with it. Records stand in for the classes that
the files name: they keep what they were given and do nothing.

Every byte is compared with the file's checksums, which torch does not look at. What a file makes of itself, in memory
and on the disk, is bounded by its size.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from thinwire.engine.checkpoint.files import open_file
from thinwire.engine.errors import CheckpointError

# Classes whose fields or arguments may be read, and which are otherwise inert.
_RECORDS = (
    "argparse.Namespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "pathlib.PosixPath",
    "types.SimpleNamespace",
)
# Python 3.11.0 to 3.11.3 pickle an enum's member by getattr and its name; these are ZeroStageEnum's values.
_MEMBERS = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since

_NUMBERS = {"b1": torch.bool, "f2": torch.float16, "f4": torch.float32, "f8": torch.float64}
_NUMBERS |= {f"i{size}": getattr(torch, f"int{8 * size}") for size in (1, 2, 4, 8)}
_NUMBERS |= {f"u{size}": getattr(torch, f"uint{8 * size}") for size in (1, 2, 4, 8)}


class Record:
    """An object of any allowed class: the `args` that it was made with, the `fields` that it was given."""

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> Record:
        """Whatever the arguments are."""
        made = super().__new__(cls)
        made.args, made.fields = args, {}
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, self.args, self.fields

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes that a pickle gives an object; its slots come as a second dict."""
        for part in state if isinstance(state, tuple) else (state,):
            self.fields.update(part or {})


class NumpyType:
    """numpy's dtype: "f8", say, little-endian or of one byte."""

    def __init__(self, code: str, *flags: Any) -> None:
        self.code = code
        self.swapped = False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """The second value is the byte order."""
        self.swapped = state[1] == ">"

    def read(self, content: bytes, shape: tuple[int, ...]) -> Tensor:
        """The values that these bytes are. Raises ValueError for what are no plain numbers."""
        dtype = _NUMBERS.get(self.code)
        if dtype is None or self.swapped:
            raise ValueError(f"numpy values of type {self.code!r} are not read, only plain numbers, little-endian")
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a numpy array of shape {shape} has {len(content)} bytes")
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


class Array:
    """numpy's ndarray: `value` is the tensor that it holds, once it has been given its state."""

    value: Tensor

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Version, shape, type, whether columns come first, bytes."""
        _, shape, kind, columns_first, content = state
        if not columns_first:
            self.value = kind.read(content, tuple(shape))
            return
        flipped: Tensor = kind.read(content, tuple(reversed(shape)))
        self.value = flipped.permute(*reversed(range(len(shape)))).contiguous()


def _number(kind: NumpyType, content: bytes) -> float:
    number: float = kind.read(content, ()).item()
    return number


def stand_ins() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What torch.serialization.safe_globals takes: each stand-in with the name that it is found under in files."""
    pairs: list[tuple[Callable[..., Any], str]] = [(Record, name) for name in _RECORDS]
    pairs += [(NumpyType, "numpy.dtype"), (Array, "numpy.ndarray")]
    pairs.append((lambda _, name: Record(_MEMBERS.get(name, name)), "builtins.getattr"))
    for module in _NUMPY:
        pairs += [(_number, f"{module}.scalar"), (lambda *_: Array(), f"{module}._reconstruct")]
    return list(pairs)


_READ_BYTES = 1 << 20
_MOST_MEMORY_TIMES, _LEAST_MEMORY = 16, 1 << 30
_DEEPEST = 100
# Values and tensors that several names share are written under each; nothing honest repeats itself more often.
_MOST_TIMES, _FEW_BYTES, _BYTES_OF_A_VALUE = 10, 1 << 20, 8


class Unreadable:
    """A value of a type that is not read."""


class _Plain:
    """Makes plain values of those of a file of `size` bytes. Tensors of the same memory become one.

    Raises ValueError for values that are nested too deep for the reader, or come to many times the file's size: one
    element expanded to a billion, or lists of the same list of the same list.
    """

    def __init__(self, size: int) -> None:
        self._known: dict[tuple[Any, ...], Tensor] = {}
        self._left = _MOST_TIMES * size + _FEW_BYTES

    def of(self, value: Any, depth: int = 0) -> Any:
        """The form of one value."""
        if depth > _DEEPEST:
            raise ValueError(f"its values are nested more than {_DEEPEST} deep")

        def inner(one: Any) -> Any:
            return self.of(one, depth + 1)

        self._take(_BYTES_OF_A_VALUE + (len(value) if isinstance(value, str) else 0))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor | Array):
            return self._tensor(value if isinstance(value, Tensor) else value.value)
        if isinstance(value, Mapping):
            return {inner(key): inner(one) for key, one in value.items()}
        if isinstance(value, list | tuple | set):
            values = [inner(one) for one in value]
            return tuple(values) if isinstance(value, tuple) else values
        if isinstance(value, Record):
            record = Record(*inner(list(value.args)))
            record.fields = inner(value.fields)
            return record
        return Unreadable()

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            what = f"layout {tensor.layout} on {tensor.device}"
            raise ValueError(f"it holds a tensor of {what}, which no checkpoint here can hold")
        self._take(tensor.numel() * tensor.itemsize)
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        return self._known.setdefault(place, tensor.detach()) if tensor.numel() else tensor.detach()

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(
                f"its values come to more than {_MOST_TIMES} times the file's size: a tensor is expanded, or the same "
                "value is there again and again"
            )


def read_pickle(path: Path, output: Path) -> dict[str, Any]:
    """Write a pickle's values to `output`, plain ones; {"plain"} of that and whether the file has checksums, "checked",
    or {"fault"}, what is wrong with it."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            plain = _Plain(os.fstat(file.fileno()).st_size)
            is_archive = zipfile.is_zipfile(file)
            checked = is_archive and _verify(file)
        with torch.serialization.safe_globals(stand_ins()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old forms of storage
            # From a map of the file: a tensor needs memory when it is written, and one at a time.
            values = plain.of(torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive))
    except pickle.UnpicklingError as error:
        return {"fault": _refused(str(error))}
    except Exception as error:  # whatever a file can bring a loader to
        return {"fault": _first_line(error)}
    try:
        torch.save(values, output)
    except (OSError, RuntimeError) as error:
        return {"fault": f"its values could not be written to {output.parent}: {_first_line(error)}"}
    return {"plain": str(output), "checked": checked}


def _verify(file: BinaryIO) -> bool:
    """Read every byte of a zip file, and compare it with the checksums; whether there are any."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        for one in entries:
            if one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size:
                raise ValueError(
                    f"its entry {one.filename} is compressed: another program than torch has packed it. Load it in "
                    "torch, and save it again"
                )
        if len({one.filename for one in entries}) < len(entries):
            raise ValueError("two of its entries have the same name")
        if sum(one.file_size for one in entries) > os.fstat(file.fileno()).st_size:
            raise ValueError("its entries are longer than the file")
        if not any(one.CRC for one in entries):
            return False
        for one in entries:
            with archive.open(one) as content:
                while content.read(_READ_BYTES):
                    pass
    return True


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
    why = (message.rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [""])[0]
    return f"it is no file of torch.save, it is damaged, or it holds what is not read from such files: {why}"


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.readline())
    for number, path in enumerate(request["files"]):
        _limit_memory(path)
        print(json.dumps(read_pickle(Path(path), Path(request["folder"]) / f"{number}.pt")), flush=True)


def _limit_memory(path: str) -> None:
    """Bound the memory that reading this file may take beside what the process has: Linux alone can."""
    with suppress(OSError, ValueError, IndexError):
        (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmData"))
        most = (int(line.split()[1]) << 10) + _MOST_MEMORY_TIMES * os.stat(path).st_size + _LEAST_MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


Reader = Callable[[Sequence[Path], Path], list[Any]]
"""Reads files, with a folder for what it needs meanwhile; the values of each."""

_PACKAGES = Path(__file__).parents[3]


def read_apart(files: Sequence[Path], folder: Path) -> list[Any]:
    """The values of each file, read in a process of its own; tensors are maps of files in `folder`.

    Raises CheckpointError, naming the file, for what cannot be read.
    """
    request = json.dumps({"folder": str(folder), "files": [str(path.absolute()) for path in files]})
    paths = os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
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
    """The values that each answer of the reading process tells of. Raises CheckpointError for one that is a fault, and
    warns of files without checksums."""
    for path, answer in zip(files, answers, strict=True):
        if "fault" in answer:
            raise CheckpointError(f"{path} cannot be read: {answer['fault']}")
    if unchecked := [path for path, answer in zip(files, answers, strict=True) if not answer["checked"]]:
        warnings.warn(
            f"{unchecked[0]} was saved without checksums, as {len(unchecked)} of {len(files)} files: damage in them is "
            "not seen",
            RuntimeWarning,
            stacklevel=2,
        )
    with torch.serialization.safe_globals([Record, Unreadable]):
        # As maps of these files: tensors take memory where they are read.
        return [torch.load(answer["plain"], weights_only=True, mmap=True) for answer in answers]
