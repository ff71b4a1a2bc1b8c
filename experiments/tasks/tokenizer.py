"""A WordPiece tokenizer trained on the corpus at hand, the same one on every run.

The library's trainer breaks ties by the order of a randomly seeded hash map. Giving it the alphabet, and
every continuation piece of one letter, in a fixed order leaves no tie to break.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from experiments.common.errors import InputError

__all__ = ["CLS", "MASK", "PAD", "SEP", "SPECIAL_TOKENS", "encode", "encode_each", "train_tokenizer"]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = 0, 2, 3, 4

_CONTINUATION = "##"
_ALPHABET_LIMIT = 400
_SAMPLE_CHARACTERS = 4_000_000


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """Trains a cased WordPiece tokenizer on an even sample of the documents.

    Args:
        documents: texts to learn pieces from.
        vocabulary: most pieces to learn, special tokens included; a small corpus gives fewer.

    Raises:
        InputError: the vocabulary has no room for the corpus's own alphabet.
    """
    stride = 1 + sum(map(len, documents)) // _SAMPLE_CHARACTERS
    sample = documents[::stride]
    alphabet = _alphabet(sample)
    reserved = [*SPECIAL_TOKENS, *(_CONTINUATION + letter for letter in alphabet)]
    needed = len(reserved) + len(alphabet)
    if vocabulary < needed:
        raise InputError(
            f"--vocab-size {vocabulary} is too small: this corpus needs at least {needed}, "
            f"for {len(alphabet)} different characters"
        )
    learner = _tokenizer(WordPiece(unk_token="[UNK]"))
    learner.train_from_iterator(
        sample,
        WordPieceTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            show_progress=False,
            special_tokens=reserved,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            continuing_subword_prefix=_CONTINUATION,
        ),
    )
    # A fresh model: in the learner, one-letter continuations would count as special and match inside text.
    return _tokenizer(WordPiece(learner.get_vocab(), unk_token="[UNK]"))


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> NDArray[np.int32]:
    """All documents as one run of token numbers, int32 `[tokens]`, each document closed by `[SEP]`."""
    runs: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    for encoding in tokenizer.encode_batch_fast(list(documents), add_special_tokens=False):
        runs.append(np.asarray([*encoding.ids, SEP], dtype=np.int32))
    return np.concatenate(runs)


def encode_each(tokenizer: Tokenizer, documents: Sequence[str], length: int) -> list[NDArray[np.int64]]:
    """Every document that is not empty by itself, cut to `length` with its `[CLS]` and `[SEP]`."""
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return [np.array([CLS, *one.ids[: length - 2], SEP], dtype=np.int64) for one in encoded if one.ids]


def _tokenizer(model: WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUATION)
    return tokenizer


def _alphabet(documents: Sequence[str]) -> list[str]:
    """The most frequent characters, ties in code point order; rarer ones become `[UNK]`."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document)
    by_frequency = sorted((-count, letter) for letter, count in counts.items() if not letter.isspace())
    return sorted(letter for _, letter in by_frequency[:_ALPHABET_LIMIT])
