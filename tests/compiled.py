"""What tests compile, kept beside this user's other caches: each is compiled once, not by every process."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["compiled"]


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
