"""Removes as far as it goes: what cannot be removed, such as a mount or a file that somebody has open on NFS, is told
and left for the next time, since clearing up is never worth a checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["remove"]


def remove(path: Path) -> str | None:
    """Remove a file, a link, never what it leads to, or a folder with all in it; what is in the way, if anything."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return None
        shutil.rmtree(path, ignore_errors=True)  # all that can be removed
        if os.path.lexists(path):
            shutil.rmtree(path)  # again, for the reason
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror or error}"
    return None
