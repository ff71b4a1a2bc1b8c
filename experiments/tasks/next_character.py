"""Next-character prediction: a small causal transformer reads text letter by letter, and learns within a few hundred
steps what masked-language modelling takes thousands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.common.errors import InputError, on_every_rank
from experiments.tasks.batches import Purpose, random_at, seeded
from experiments.tasks.corpus import Corpus
from thinwire.comm import Communicator

__all__ = ["CharacterModel", "CharacterModelSize", "NextCharacterTask", "Text", "encode", "share_text"]

_RAREST = 1e-4
_MOST_KINDS = 255
_EMBEDDING_DEVIATION = 0.1
_WINDOWS_AT_ONCE = 64


@dataclass(frozen=True)
class Text:
    """A corpus in characters, uint8 `[n]` each, the same on every rank.

    Attributes:
        kinds: of characters; 0 stands for all that are rare.
        training: to train on.
        validation: held out.
    """

    kinds: int
    training: NDArray[np.uint8]
    validation: NDArray[np.uint8]


@dataclass(frozen=True)
class CharacterModelSize:
    """Layers, width, attention heads, and characters a window; the feed-forward width is four times the width."""

    layers: int
    width: int
    heads: int
    length: int


def share_text(comm: Communicator, read: Callable[[], Corpus], length: int) -> Text:
    """Rank 0 reads, and every rank gets the same characters. Collective.

    Args:
        comm: all ranks call together.
        read: gives the corpus; called on rank 0 only.
        length: characters a window.

    Raises:
        InputError: on every rank, if rank 0 could not read the corpus, or one of its two texts has no window.
    """

    def prepare() -> Text | None:
        if comm.rank:
            return None
        corpus = read()
        text = encode("\n".join(corpus.training), "\n".join(corpus.validation))
        for name, characters in (("training", text.training), ("held-out", text.validation)):
            if len(characters) <= length + 1:
                raise InputError(
                    f"the corpus is too short: its {name} text has {len(characters)} characters, "
                    f"and a window takes {length}"
                )
        return text

    text = on_every_rank(comm, prepare)
    header = torch.zeros(3, dtype=torch.int64)
    if text is not None:
        header = torch.tensor([text.kinds, len(text.training), len(text.validation)])
    comm.broadcast(header)
    kinds, training, validation = header.tolist()
    content = torch.empty(training + validation, dtype=torch.uint8)
    if text is not None:
        content = torch.from_numpy(np.concatenate([text.training, text.validation]))
    comm.broadcast(content)
    return Text(kinds, content.numpy()[:training], content.numpy()[training:])


def encode(training: str, validation: str) -> Text:
    """Numbers the characters of which there is one in 10,000 of the training text, most frequent first."""
    points = np.frombuffer(training.encode("utf-32-le"), dtype=np.uint32)
    found, counts = np.unique(points, return_counts=True)
    frequent = counts >= _RAREST * len(points)
    order = np.argsort(-counts[frequent], kind="stable")
    letters = found[frequent][order][:_MOST_KINDS]
    numbers = np.zeros(0x110000, dtype=np.uint8)
    numbers[letters] = np.arange(1, len(letters) + 1)
    held_out = np.frombuffer(validation.encode("utf-32-le"), dtype=np.uint32)
    return Text(len(letters) + 1, numbers[points], numbers[held_out])


class CharacterModel(nn.Module):
    """A pre-LN transformer over characters, in which each place sees itself and those before it."""

    def __init__(self, size: CharacterModelSize, kinds: int) -> None:
        """Random weights."""
        super().__init__()
        self.characters = nn.Embedding(kinds, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, kinds, bias=False)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=_EMBEDDING_DEVIATION)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next character at every place of `inputs`.

        inputs: int64 `[windows, length]`. Returns fp32 `[windows, length, kinds]`.
        """
        hidden = self.characters(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, size: CharacterModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_feed_forward = (nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.mix = nn.Linear(size.width, size.width, bias=False)
        self.widen = nn.Linear(size.width, 4 * size.width, bias=False)
        self.narrow = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.qkv(self.before_attention(hidden))
        # [windows, length, 3, heads, head size] to three of [windows, heads, length, head size]
        q, k, v = projected.unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).flatten(2))
        return hidden + self.narrow(F.gelu(self.widen(self.before_feed_forward(hidden))))


class NextCharacterTask:
    """The task that `experiments.training.trainer` trains: windows are functions of (seed, step, rank) only."""

    def __init__(self, text: Text, size: CharacterModelSize, batch_size: int, validation_windows: int) -> None:
        """Takes the text, the model's size, windows a rank a step, and how many held-out windows to validate on."""
        self.size = size
        self.batch_size = batch_size
        self.kinds = text.kinds
        self._training = torch.from_numpy(text.training)
        held_out = torch.from_numpy(text.validation)
        starts = np.linspace(0, len(held_out) - size.length - 1, validation_windows).astype(np.int64)
        self._validation = self._windows(held_out, starts)

    def build_model(self, seed: int) -> CharacterModel:
        """A model whose weights depend on the seed only."""
        with seeded(seed):
            return CharacterModel(self.size, self.kinds)

    def training_loss(self, model: Callable[[Tensor], Tensor], seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Mean cross-entropy, in nats a character, of windows drawn by (seed, step, rank)."""
        random = random_at(Purpose.ORDER, seed, step, rank)
        starts = random.integers(0, len(self._training) - self.size.length, self.batch_size)
        windows = self._windows(self._training, starts)
        return _summed_loss(model, windows) / windows[:, 1:].numel()

    def validation_sum(self, model: Callable[[Tensor], Tensor], rank: int, ranks: int) -> tuple[float, int]:
        """Every `ranks`-th held-out window."""
        mine = self._validation[rank::ranks]
        losses = [_summed_loss(model, windows).item() for windows in mine.split(_WINDOWS_AT_ONCE)]
        return sum(losses), mine[:, 1:].numel()

    def _windows(self, text: Tensor, starts: NDArray[np.int64]) -> Tensor:
        """Windows of one character more than the model reads, int64 `[len(starts), length + 1]`."""
        places = torch.from_numpy(starts)[:, None] + torch.arange(self.size.length + 1)
        return text[places].long()


def _summed_loss(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Cross-entropy of every character but the first."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
