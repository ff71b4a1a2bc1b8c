"""Which of several texts is this passage from? A task with labels that any texts give, without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.common.errors import InputError, on_every_rank
from experiments.tasks.corpus import load, standard_library_files
from experiments.tasks.tokenizer import CLS, encode, train_tokenizer
from thinwire.comm import Communicator

__all__ = ["Passages", "read_texts", "share_passages"]

_PACKAGES = 4
_HOLD_OUT_EVERY = 10
_VALIDATION, _TEST = 3, 8
"""Of ten passages in a row, which one is held out for what."""


@dataclass(frozen=True)
class Passages:
    """Passages of one length, all texts alike many, the same on every rank.

    Attributes:
        classes: names of the texts; a label is a place in here.
        vocabulary: number of different tokens, special ones included.
        tokens: int64 `[passages, 1 + length]`, each behind `[CLS]`.
        labels: int64 `[passages]`.
        part: 0 for training, 1 for validation, 2 for the test; `[passages]`.
    """

    classes: tuple[str, ...]
    vocabulary: int
    tokens: Tensor
    labels: Tensor
    part: Tensor

    def of_part(self, part: int) -> list[dict[str, Tensor]]:
        """The samples of one part, as a Trainer takes them."""
        chosen = (self.part == part).nonzero().flatten().tolist()
        return [{"input_ids": self.tokens[one], "labels": self.labels[one]} for one in chosen]


def read_texts(files: Sequence[Path] | None) -> dict[str, str]:
    """Texts by name: the files', or those of the standard library's largest packages.

    Raises:
        InputError: there are fewer than two, or one cannot be read.
    """
    if not files:
        return _packages()
    if len({path.name for path in files}) < max(2, len(files)):
        raise InputError("--corpus takes two text files or more, of different names: each is a class")
    texts = {}
    for path in files:
        corpus = load([path])
        texts[path.stem] = "".join([*corpus.training, *corpus.validation])
    return texts


def share_passages(comm: Communicator, read: Callable[[], Mapping[str, str]], vocabulary: int, length: int) -> Passages:
    """Rank 0 reads, learns a tokenizer and cuts; every rank gets the same passages.

    Each text gives as many as the shortest, its first ones. Every tenth is held out for validation, every tenth for the
    test.

    Args:
        comm: all ranks call together.
        read: gives the texts; called on rank 0 only.
        vocabulary: most tokens to learn.
        length: tokens a passage.

    Raises:
        InputError: on every rank, if rank 0 could not read the texts, or one has no passage for every part.
    """

    def prepare() -> tuple[list[str], Tensor]:
        if comm.rank:
            return [], torch.empty(0)
        texts = read()
        # Lines, so that the tokenizer's even sample is one of all texts.
        learned = train_tokenizer([line for text in texts.values() for line in text.splitlines() if line], vocabulary)
        return list(texts), torch.from_numpy(
            _cut({name: encode(learned, [text]) for name, text in texts.items()}, length)
        )

    names, passages = on_every_rank(comm, prepare)
    classes = comm.all_gather_bytes("\n".join(names).encode())[0].decode().split("\n")
    shape = torch.tensor(passages.shape) if comm.rank == 0 else torch.empty(3, dtype=torch.int64)
    comm.broadcast(shape)
    passages = passages if comm.rank == 0 else torch.empty(shape.tolist(), dtype=torch.int64)
    comm.broadcast(passages)
    return _labelled(tuple(classes), passages)


def _cut(tokens: Mapping[str, np.ndarray], length: int) -> np.ndarray:
    """int64 `[texts, passages, length]`."""
    count = min(len(run) // length for run in tokens.values())
    if count < _HOLD_OUT_EVERY:
        shortest = min(tokens, key=lambda name: len(tokens[name]))
        raise InputError(
            f"{shortest} has {len(tokens[shortest])} tokens, and at least {_HOLD_OUT_EVERY} passages of {length} are "
            "needed: give a longer text"
        )
    return np.stack([run[: count * length].reshape(count, length) for run in tokens.values()]).astype(np.int64)


def _labelled(classes: tuple[str, ...], passages: Tensor) -> Passages:
    texts, count, length = passages.shape
    place = torch.arange(count) % _HOLD_OUT_EVERY
    part = (place == _VALIDATION).long() + 2 * (place == _TEST).long()
    start = torch.full((texts * count, 1), CLS)
    return Passages(
        classes=classes,
        vocabulary=int(passages.max()) + 1,
        tokens=torch.cat([start, passages.view(texts * count, length)], dim=1),
        labels=torch.arange(texts).repeat_interleave(count),
        part=part.repeat(texts),
    )


def _packages() -> dict[str, str]:
    """The largest packages of the standard library, by name: all of their sources in one text each."""
    found: dict[str, list[str]] = {}
    for path in standard_library_files():
        package = _package_of(path)
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # Python tests its own decoding with such
            continue
        if package:
            found.setdefault(package, []).append(text)
    texts = {name: "\n".join(parts) for name, parts in found.items()}
    largest = sorted(texts, key=lambda name: (-len(texts[name]), name))[:_PACKAGES]
    return {name: texts[name] for name in sorted(largest)}


def _package_of(path: Path) -> str:
    """The outermost folder with an __init__.py around a file; empty for a module by itself."""
    packages = [folder for folder in path.parents if (folder / "__init__.py").exists()]
    return packages[-1].name if packages else ""
