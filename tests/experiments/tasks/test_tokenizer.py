"""A tokenizer learned from little text: the same every time, and faithful to the text."""

from __future__ import annotations

import pytest

from experiments.common.errors import InputError
from experiments.tasks.tokenizer import SEP, SPECIAL_TOKENS, encode, train_tokenizer

DOCUMENTS = [f"def function_{n}(value: int) -> int:\n    return value * {n} + offset_{n % 7}\n" for n in range(300)]


def test_training_is_deterministic() -> None:
    first, second = train_tokenizer(DOCUMENTS, 200), train_tokenizer(DOCUMENTS, 200)
    assert first.get_vocab() == second.get_vocab()
    assert len(set(first.get_vocab().values())) == first.get_vocab_size() <= 200


def test_special_tokens_come_first() -> None:
    vocabulary = train_tokenizer(DOCUMENTS, 150).get_vocab()
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


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
