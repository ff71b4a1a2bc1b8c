"""Passages with labels: alike many of every text, whole, and none of them in two parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.common.errors import InputError
from experiments.tasks.passages import Passages, read_texts, share_passages
from experiments.tasks.tokenizer import CLS
from tests.experiments.helpers import write_text
from thinwire.comm import Communicator, threads

TEXTS = {"letters": "a b c d e f g h " * 40, "numbers": "1 2 3 4 5 6 7 8\n" * 60}


def shared(ranks: int = 1, length: int = 4, texts: dict[str, str] = TEXTS) -> list[Passages]:
    def rank(comm: Communicator) -> Passages:
        return share_passages(comm, lambda: texts, 60, length)

    return threads.run(rank, ranks)


def test_every_rank_gets_the_passages_of_rank_0() -> None:
    first, *others = shared(3)
    assert first.classes == ("letters", "numbers")
    for other in others:
        assert (other.classes, other.vocabulary) == (first.classes, first.vocabulary)
        assert torch.equal(other.tokens, first.tokens)
        assert torch.equal(other.labels, first.labels)


def test_texts_give_alike_many_passages_in_three_parts() -> None:
    (passages,) = shared()
    count = len(passages.labels) // 2
    assert count >= 80
    assert passages.labels.tolist() == [0] * count + [1] * count
    assert passages.tokens.shape == (2 * count, 5)
    assert (passages.tokens[:, 0] == CLS).all()
    parts = [passages.of_part(part) for part in range(3)]
    assert sum(map(len, parts)) == 2 * count
    assert len(parts[1]) == len(parts[2]) == pytest.approx(2 * count / 10, abs=2)
    letters = {token for sample in parts[0] if sample["labels"] == 0 for token in sample["input_ids"][1:].tolist()}
    numbers = {token for sample in parts[0] if sample["labels"] == 1 for token in sample["input_ids"][1:].tolist()}
    assert len(letters & numbers) <= 1  # what closes a text


def test_a_text_without_passages_is_refused() -> None:
    with pytest.raises(InputError, match=r"short has .* tokens, and at least 10 passages of 4 are needed"):
        shared(texts=TEXTS | {"short": "a b c"})


def test_files_are_classes(tmp_path: Path) -> None:
    files = [write_text(tmp_path / f"{name}.txt", 20) for name in ("one", "two")]
    texts = read_texts(files)
    assert list(texts) == ["one", "two"]
    assert texts["one"] == files[0].read_text()
    with pytest.raises(InputError, match="takes two text files or more"):
        read_texts(files[:1])
    with pytest.raises(InputError, match="takes two text files or more, of different names"):
        read_texts([files[0], files[0]])
    with pytest.raises(InputError, match="absent"):
        read_texts([files[0], tmp_path / "absent"])


def test_without_files_there_are_pythons_own_packages() -> None:
    texts = read_texts(None)
    assert len(texts) == 4
    assert all(len(text) > 100_000 for text in texts.values())
