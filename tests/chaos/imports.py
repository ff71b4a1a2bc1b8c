"""DeepSpeed's checkpoints that have come to harm: the import ends in an error of ours with nothing written, or in what
the undamaged one gives, bit for bit.

Files of every stage and universal ones are damaged by bits, cut short, compressed, exchanged for what is no file, made
to grow when they are read, or edited by hand. An edit may change a setting or a counter; of weights and moments none
may become another, and an engine loads what was imported, or says why not.
"""

import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.chaos.checkpoints import flip_bits, truncate, zero
from tests.chaos.harness import Trial, descend, is_documented, over_seeds
from tests.deepspeed.files.deepspeed_files import deepspeeds_names, write_sharded, write_universal, write_unsharded
from tests.deepspeed.files.test_import import groups_of, make, make_trained, read_here, settings
from thinwire import initialize
from thinwire.comm import threads
from thinwire.deepspeed.files.importing import import_checkpoint
from thinwire.engine.checkpoint.folder import LOCK, _process
from thinwire.engine.checkpoint.store import CheckpointStore

HALF = torch.bfloat16
WRITES: dict[str, tuple[Callable[..., Path], torch.dtype]] = {
    "stage 0": (write_unsharded, torch.float32),
    "stage 0 in bf16": (partial(write_unsharded, flat=True), HALF),
    "stage 1": (partial(write_sharded, stage=1, world=2), torch.float32),
    "stage 2 in bf16": (partial(write_sharded, stage=2, world=2), HALF),
    "stage 3 in bf16": (partial(write_sharded, stage=3, world=2), HALF),
    "universal": (partial(write_universal, stage=1), torch.float32),
    "universal of stage 3 in bf16": (partial(write_universal, stage=3), HALF),
}
MOST_MEMORY = 256 << 20  # more than an honest import of these takes, and less than any bomb
GROWN = 100_000_000


class Form(NamedTuple):
    """A whole checkpoint, what its import gives, and an engine to load that."""

    folder: Path
    seal: Any
    values: dict[tuple[str, str], Tensor]
    engine: Any


@over_seeds
@contextmanager
def run() -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stderr(io.StringIO()):
        root = Path(temporary)
        forms = {name: _form(root / name, *WRITES[name]) for name in WRITES}

        def trial(seed: str) -> Iterator[str]:
            source = random.Random(seed)
            name = source.choice(list(forms))
            with tempfile.TemporaryDirectory(dir=root) as place:
                folder, output = Path(place) / "in", Path(place) / "out"
                shutil.copytree(forms[name].folder, folder)
                kept = _litter(output, source)
                way = source.choice(list(WAYS))
                path = source.choice(sorted(folder.rglob("*.pt" if source.random() < 0.95 else "latest*")))
                done = WAYS[way](path, source)
                if fault := _import(forms[name], folder, output, kept, edited=way == "edit"):
                    yield f"{name}, {way} {path.relative_to(folder)} {done or ''}: {fault}"

        yield trial


def _form(root: Path, write: Callable[..., Path], dtype: torch.dtype) -> Form:
    frozen = write is not write_unsharded
    write(root / "in", make_trained(5, frozen), dtype=dtype)
    import_checkpoint(root / "in", root / "out", read=read_here)
    model, groups = make(9, frozen)
    parameters, config = groups_of(model, groups), settings(1, dtype)
    engine, *_ = initialize(model=model, model_parameters=parameters, config=config, comm=threads.single(60.0))
    return Form(root / "in", _seal(root / "out"), _values(root / "out"), engine)


def _seal(folder: Path) -> Any:
    """What says of every value that is saved whether it is another."""
    with _loaded(folder) as found:
        return found.model, found.shared, [file.sha256 for file in found.manifest.files]


def _values(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Everything that has a value for each element."""
    with _loaded(folder) as found:
        every = {(entry.kind, entry.name) for entry in found.manifest.slices if not entry.kind.startswith("scalar.")}
        return {
            (kind, name): found.read(kind, name, 0, found.model.numel(name)).view(torch.uint8) for kind, name in every
        }


def _loaded(folder: Path) -> Any:
    return CheckpointStore(folder, threads.single(60.0)).load()


def _litter(output: Path, source: random.Random) -> dict[str, bool]:
    """Put into the folder what others, and imports that were killed, have left; whether that has to stay."""
    if source.random() < 0.5:
        return {}
    (output / ".import.0123abcd.partial" / "first").mkdir(parents=True)
    (output / ".import.0123abcd.partial" / "first" / "0.safetensors").write_bytes(b"half")
    if source.random() < 0.5:
        owner = {**_process(os.getpid()), "started": "0", "locked": True}  # before it the number was another's
        (output / ".import.0123abcd.partial" / "owner.json").write_text(json.dumps(owner))
    (output / "notes").write_bytes(b"notes")
    return {".import.0123abcd.partial": False, "notes": True}


def _import(form: Form, folder: Path, output: Path, kept: dict[str, bool], *, edited: bool) -> str | None:
    """What is wrong with how it ended."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        import_checkpoint(folder, output, read=read_here)
    except Exception as error:
        if not is_documented(error):
            raise
        names = {path.name for path in output.iterdir()} if output.exists() else set()
        if not names - kept.keys() <= {LOCK}:
            return f"it has left {sorted(names)} behind after {error}"
        return _memory(before)
    names = {path.name for path in output.iterdir()}
    if missing := {name for name, stays in kept.items() if stays != (name in names)}:
        return f"{missing} should have stayed, or gone"
    if not edited:
        return _memory(before) or (None if _seal(output) == form.seal else "other values were imported")
    return _memory(before) or _edited(form, output)


def _memory(before: int) -> str | None:
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return None if grown < MOST_MEMORY else f"it took {grown >> 20} MiB"


def _edited(form: Form, output: Path) -> str | None:
    """What is wrong with an import in which settings may be others."""
    values = _values(output)
    for key in values.keys() & form.values.keys():
        # Another number in the place of one is a value like any other.
        if key[1] != "scale" and not torch.equal(values[key], form.values[key]):
            return f"{key} has other values"
    lost = sorted(key for key in form.values.keys() - values.keys() if key[0] in ("weight", "master"))
    try:
        form.engine.load_checkpoint(output)
    except Exception as error:
        if not is_documented(error):
            raise
        return None
    return f"{lost} are gone, and an engine loads the rest" if lost else None


# Ways of damage: each returns what it has done, if that needs words


def _flip_tensor(path: Path, source: random.Random) -> None:
    """A bit of the longest entry, which is nearly always a tensor's."""
    if not zipfile.is_zipfile(path):
        return flip_bits(path, source)
    with zipfile.ZipFile(path) as archive:
        one = max(archive.infolist(), key=lambda one: one.file_size)
    content = bytearray(path.read_bytes())
    content[one.header_offset + source.randrange(100, 100 + one.file_size)] ^= 1 << source.randrange(8)
    path.write_bytes(content)
    return None


def _compress(path: Path, source: random.Random) -> None:
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        entries = {one.filename: archive.read(one) for one in archive.infolist()}
    kind = source.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    chosen = source.choice([None, *entries])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content, kind if chosen in (None, name) else zipfile.ZIP_STORED)


def _exchange(path: Path, source: random.Random) -> str:
    path.unlink()
    what = source.choice(("FIFO", "folder", "/dev/zero", "/dev/tty", path.name, "nothing", "/proc/self/mem"))
    if what == "FIFO":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(what)
    return f"for {what}"


VALUES: list[Any] = [
    *(None, True, -1, 3, 1.5, 10**30, 1 << 600, float("inf"), float("nan"), "", "text", "../x", b"bytes"),
    *([], [None], [[1]], {}, {"a": None}, {1: 2}, (), torch.ones(1), torch.ones(3), torch.tensor(float("inf"))),
    *(torch.ones(2, dtype=torch.complex64), torch.tensor(7), torch.float16, torch.Size([3]), set()),
]


def _edit(path: Path, source: random.Random) -> str:
    """Put another value, or none, in one place; where and what."""

    def change(content: Any) -> tuple[Any, str]:
        if not (isinstance(content, dict | list) and content):
            return source.choice(VALUES), "as a whole"
        place, inner, key = descend(content, source, 0.8)
        if isinstance(inner, dict) and source.random() < 0.15:
            del inner[key]
            return content, f"without {place}"
        inner[key] = copy.deepcopy(source.choice(VALUES))
        return content, f"{place} = {inner[key]!r:.60}"

    return _rewrite(path, change)


def _grow(path: Path, source: random.Random) -> str:
    """Make a file many times as large when it is read."""
    way = source.choice(("expanded", "repeated", "shared", "packed", "text"))
    value: Any = torch.ones(1).expand(GROWN)
    if way == "repeated":
        value = "text"
        for _ in range(8):
            value = [value] * 10
    elif way == "shared":
        value = [torch.ones(1000)] * (GROWN // 1000)
    elif way == "text":
        value = ["x" * 10_000] * (GROWN // 10_000)
    elif way == "packed":
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr("archive/data/99", bytes(GROWN), zipfile.ZIP_DEFLATED)
        return way

    def change(content: Any) -> tuple[Any, str]:
        if isinstance(content, dict) and source.random() < 0.7:
            return {**content, source.choice([*content, "mine"]): value}, way
        return value, way

    return _rewrite(path, change)


def _rewrite(path: Path, change: Callable[[Any], tuple[Any, str]]) -> str:
    if path.suffix != ".pt":
        path.write_text("text")
        return "by a word"
    with deepspeeds_names():
        content, done = change(torch.load(path, weights_only=False))
        torch.save(content, path)
    return done


WAYS: dict[str, Callable[[Path, random.Random], str | None]] = {
    "flip": flip_bits,
    "flip a tensor of": _flip_tensor,
    "cut": truncate,
    "zero": zero,
    "compress": _compress,
    "exchange": _exchange,
    "grow": _grow,
    "edit": _edit,
}
