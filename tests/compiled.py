"""What tests compile: each is compiled once, not by every process. Our own programs are kept beside this user's other
caches, and the library's kernels where numba keeps them."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

__all__ = ["compile_kernels_once", "compiled"]


def compiled(name: str, made_of: Iterable[bytes], compile_to: Callable[[Path], None], *, suffix: str = ".so") -> Path:
    """The file of what it is `made_of`: sources, versions, options. `compile_to(path)` writes it if no run did."""
    digest = hashlib.sha256()
    for one in made_of:
        digest.update(len(one).to_bytes(8, "little") + one)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire-tests"
    file = cache / f"{name}_{digest.hexdigest()[:16]}{suffix}"
    if file.exists():
        return file
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / file.name
        compile_to(made)
        made.replace(file)  # whole or absent, whoever else builds it
    return file


def compile_kernels_once() -> None:
    """From now on, processes that need a kernel at the same time compile it in one of them; the others wait for it.

    Only of what numba keeps on disk, none of which calls another of its kind: two locks are never held at once. A fork
    of a process that has called this does so already.
    """
    try:
        from numba.core.dispatcher import Dispatcher
    except ImportError:  # then nothing is compiled
        return
    compile_one = Dispatcher.compile
    if compile_one.__name__ == "compile_or_wait":
        return

    def compile_or_wait(kernel: Any, signature: Any) -> Any:
        folder = kernel._cache.cache_path
        if folder is None:
            return compile_one(kernel, signature)
        Path(folder).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(folder, f"{kernel.py_func.__qualname__}.lock")):
            return compile_one(kernel, signature)

    Dispatcher.compile = compile_or_wait
