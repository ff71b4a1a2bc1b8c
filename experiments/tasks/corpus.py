"""Text to train on: any files, or by default the Python standard library's own sources.

Every machine that can run this has the standard library: about 30 MB of real text, without a download.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.errors import InputError

__all__ = ["Corpus", "corpus_name", "load", "standard_library_files"]

HOLD_OUT_EVERY = 20
"""One document in this many is held out for validation: 5%."""


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, in a fixed order.

    Attributes:
        training: texts of the training documents.
        validation: texts of the held-out documents.
    """

    training: list[str]
    validation: list[str]


def load(files: Sequence[Path] | None = None) -> Corpus:
    """Reads a corpus and splits it; the same files give the same split on every rank and every run.

    Args:
        files: text files in UTF-8; None takes the standard library's sources.

    Raises:
        InputError: a file is missing, is empty or is not text.
    """
    if files is None:
        # Python tests its own decoding with sources that are not UTF-8: those are passed over.
        documents = [text for path in standard_library_files() if (text := _decode(path)) is not None]
        return _split(documents)
    return _split([_read(path) for path in files])


def corpus_name(files: Sequence[Path] | None) -> str:
    """What tables and pictures call the text that `load` reads."""
    return ", ".join(path.name for path in files) if files else "Python's standard library"


def standard_library_files() -> list[Path]:
    """The interpreter's own .py files, installed packages left out, sorted by path."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        # Not entered at all: there may be a hundred thousand files in them, and slow disks to find them on.
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _read(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"corpus file {path} is not a file: give paths of text files to --corpus")
    text = _decode(path)
    if text is None:
        raise InputError(f"corpus file {path} is not text: --corpus takes plain text in UTF-8")
    if not text.strip():
        raise InputError(f"corpus file {path} is empty: --corpus takes files with text in them")
    return text


def _decode(path: Path) -> str | None:
    """The file's text, or None when it is binary or not UTF-8."""
    data = path.read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _split(documents: list[str]) -> Corpus:
    """Holds out whole documents; with too few to choose from, the end of each one.

    Blank ones and repetitions are dropped, so that nothing held out is trained on.
    """
    documents = list(dict.fromkeys(document for document in documents if document.strip()))
    if len(documents) >= HOLD_OUT_EVERY:
        kept = [text for index, text in enumerate(documents) if index % HOLD_OUT_EVERY]
        return Corpus(kept, documents[::HOLD_OUT_EVERY])
    cut = [_cut_end(document) for document in documents]
    return Corpus([body for body, _ in cut], [end for _, end in cut])


def _cut_end(document: str) -> tuple[str, str]:
    """Cuts the last twentieth off, at a space or line end, so that no word is split."""
    cut = len(document) - len(document) // HOLD_OUT_EVERY
    while cut < len(document) and not document[cut].isspace():
        cut += 1
    return document[:cut], document[cut:]
