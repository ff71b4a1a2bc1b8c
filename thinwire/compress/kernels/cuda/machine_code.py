"""Machine code of CUDA kernels kept on disk: compiling takes a good part of a second, each rank, each start."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from thinwire.compress.kernels.cuda.toolkit import Toolkit

__all__ = ["cache_folder", "machine_code"]


def machine_code(toolkit: Toolkit, source: str, options: Sequence[str], folder: Path | None = None) -> bytes:
    """`source` compiled with `options`: from `folder`, by default `cache_folder()`, else compiled and left there.

    The key is everything it depends on: the text, headers pasted in, the options, architecture among them, and the
    compiler. Where the folder cannot be written to, nothing is kept.
    """
    key = hashlib.sha256("\0".join([toolkit.compiler, *options, source]).encode()).hexdigest()
    path = (cache_folder() if folder is None else folder) / f"{key}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    code = toolkit.compile(source, options)
    with suppress(OSError):
        _write_whole(path, code)
    return code


def cache_folder() -> Path:
    """`thinwire/cuda` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire" / "cuda"


def _write_whole(path: Path, code: bytes) -> None:
    """At once: other ranks may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        os.replace(written, path)
    except OSError:
        os.unlink(written)
        raise
