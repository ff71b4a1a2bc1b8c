"""Texts, their tokens, and passages with labels: what is trained on, held out and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.common.errors import InputError
from experiments.tasks.corpus import load, standard_library_files
from experiments.tasks.passages import Passages, read_texts, share_passages
from experiments.tasks.tokenizer import CLS, SEP, SPECIAL_TOKENS, encode, train_tokenizer
from tests.experiments.helpers import write_text
from thinwire.comm import Communicator, threads


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_standard_library_is_large_sorted_and_without_installed_packages() -> None:
    files = standard_library_files()
    assert files == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_standard_library_is_the_default_and_splits_by_files() -> None:
    corpus = load()
    assert sum(map(len, corpus.training)) > 5_000_000
    assert not set(corpus.training) & set(corpus.validation)
    share = len(corpus.validation) / (len(corpus.validation) + len(corpus.training))
    assert share == pytest.approx(0.05, abs=0.005)


def test_many_files_are_held_out_whole(tmp_path: Path) -> None:
    files = [write(tmp_path, f"{index:02}.txt", f"text number {index}") for index in range(45)]
    corpus = load(files)
    assert corpus.validation == ["text number 0", "text number 20", "text number 40"]
    assert len(corpus.training) == 42


def test_a_single_file_is_cut_between_words(tmp_path: Path) -> None:
    text = " ".join(f"word{index}" for index in range(1000))
    corpus = load([write(tmp_path, "one.txt", text)])
    assert corpus.training[0] + corpus.validation[0] == text
    assert corpus.validation[0].startswith(" word")
    assert len(corpus.validation[0]) == pytest.approx(len(text) / 20, rel=0.1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not text"),
        ("Zażółć gęślą jaźń".encode("utf-16"), "is not text"),
        ("Grüße".encode("latin-1"), "is not text"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    good, bad = write(tmp_path, "good.txt", "some text"), write(tmp_path, "bad.txt", content)
    with pytest.raises(InputError, match=rf"bad\.txt.*{complaint}"):
        load([good, bad])


DOCUMENTS = [f"def function_{n}(value: int) -> int:\n    return value * {n} + offset_{n % 7}\n" for n in range(300)]


def test_training_is_deterministic() -> None:
    first, second = train_tokenizer(DOCUMENTS, 200), train_tokenizer(DOCUMENTS, 200)
    assert first.get_vocab() == second.get_vocab()
    assert len(set(first.get_vocab().values())) == first.get_vocab_size() <= 200


def test_text_survives_encoding() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 200)
    numbers = encode(tokenizer, ["return value"])
    assert numbers[-1] == SEP
    assert tokenizer.decode(numbers[:-1].tolist()) == "return value"


def test_documents_are_joined_by_separators() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 200)
    assert (encode(tokenizer, DOCUMENTS[:9]) == SEP).sum() == 9
    assert encode(tokenizer, []).shape == (0,)


def test_special_tokens_spelled_out_in_the_text_are_text() -> None:
    text = "[SEP] [MASK] # #e ##e"
    numbers = encode(train_tokenizer([*DOCUMENTS, text] * 2, 250), [text])
    assert (numbers[:-1] >= len(SPECIAL_TOKENS)).all()


def test_a_vocabulary_without_room_for_the_alphabet_is_refused() -> None:
    with pytest.raises(InputError, match="--vocab-size 20 is too small"):
        train_tokenizer(DOCUMENTS, 20)


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
