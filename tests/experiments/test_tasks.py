"""What experiments train, and on what: texts, tokens, passages, batches, characters; BERTs, and peers of attention."""

import contextlib
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from experiments.common.errors import InputError
from experiments.tasks import next_character, tokenizer
from experiments.tasks.attention_peers import flex_mask, gathered_attention
from experiments.tasks.batches import MaskedBatches, pack
from experiments.tasks.corpus import load
from experiments.tasks.digits import DigitsTask
from experiments.tasks.masking import IGNORED, mask_tokens
from experiments.tasks.next_character import CharacterModelSize, NextCharacterTask
from experiments.tasks.passages import Passages, share_passages
from experiments.tasks.tokenizer import CLS, MASK, SEP, SPECIAL_TOKENS, train_tokenizer
from thinwire.comm import threads
from thinwire.sparse_attn import BigBird, Fixed, reference_attention


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_standard_library_is_the_default_and_splits_by_files() -> None:
    corpus = load()
    assert sum(map(len, corpus.training)) > 5_000_000
    assert not set(corpus.training) & set(corpus.validation)
    share = len(corpus.validation) / (len(corpus.validation) + len(corpus.training))
    assert share == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b" \n\t ", "is empty"), (b"\x89PNG\r\n\x1a\n\0\0", "is not text"), ("Grüße".encode("latin-1"), "is not text")],
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    good, bad = write(tmp_path, "good.txt", "some text"), write(tmp_path, "bad.txt", content)
    with pytest.raises(InputError, match=rf"bad\.txt.*{complaint}"):
        load([good, bad])


DOCUMENTS = [f"def function_{n}(value: int) -> int:\n    return value * {n} + offset_{n % 7}\n" for n in range(300)]


def test_text_survives_encoding_and_documents_are_joined_by_separators() -> None:
    trained = train_tokenizer(DOCUMENTS, 200)
    assert trained.get_vocab() == train_tokenizer(DOCUMENTS, 200).get_vocab()
    numbers = tokenizer.encode(trained, ["return value"])
    assert numbers[-1] == SEP
    assert trained.decode(numbers[:-1].tolist()) == "return value"
    assert (tokenizer.encode(trained, DOCUMENTS[:9]) == SEP).sum() == 9
    assert tokenizer.encode(trained, []).shape == (0,)


TEXTS = {"letters": "a b c d e f g h " * 40, "numbers": "1 2 3 4 5 6 7 8\n" * 60}


def shared(ranks: int) -> list[Passages]:
    return threads.run(lambda comm: share_passages(comm, lambda: TEXTS, 60, 4), ranks)


def test_texts_give_alike_many_passages_in_three_parts_on_every_rank() -> None:
    passages, *others = shared(3)
    assert passages.classes == ("letters", "numbers")
    assert all(torch.equal(other.tokens, passages.tokens) for other in others)
    assert all(torch.equal(other.labels, passages.labels) for other in others)
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


def test_packing_keeps_the_order_and_frames_each_sequence() -> None:
    run = np.arange(FIRST, FIRST + 25, dtype=np.int32)
    sequences = pack(run, 10)
    assert sequences.shape == (3, 10)
    assert (sequences[:, 0] == CLS).all()
    assert (sequences[:, -1] == SEP).all()
    with pytest.raises(InputError, match="--sequence-length"):
        pack(run[:7], 10)
    assert np.array_equal(sequences[:, 1:-1].ravel(), run[:24])


def test_a_pass_over_the_corpus_meets_every_sequence_once() -> None:
    count, ranks, size = 24, 3, 2
    sequences = np.full((count, 6), SEP, dtype=np.int32)
    sequences[:, 1] = np.arange(count)
    batches = MaskedBatches(sequences, VOCABULARY)
    batches_of_a_pass = (
        batches.training(seed=0, step=step, rank=rank, ranks=ranks, size=size)
        for step in range(count // (ranks * size))
        for rank in range(ranks)
    )
    seen = sorted(_origin(inputs, labels) for pair in batches_of_a_pass for inputs, labels in zip(*pair, strict=True))
    assert seen == list(range(count))


def _origin(inputs: Tensor, labels: Tensor) -> int:
    """The number in second place, whether it was masked or not."""
    return int(inputs[1]) if int(labels[1]) == IGNORED else int(labels[1])


VOCABULARY = 500
FIRST = len(SPECIAL_TOKENS)


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(FIRST, VOCABULARY, (rows, length))


def test_proportions_are_those_of_the_paper() -> None:
    original = tokens(2000, 100)
    inputs, labels = mask_tokens(original, VOCABULARY, np.random.default_rng(1))
    chosen = labels != IGNORED
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert (inputs[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (inputs[chosen] == original[chosen]).mean() == pytest.approx(0.1 + 0.1 / VOCABULARY, abs=0.01)


@given(rows=st.integers(1, 6), length=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_only_chosen_ordinary_tokens_change(rows: int, length: int, seed: int) -> None:
    original = np.random.default_rng(seed).integers(0, VOCABULARY, (rows, length))
    before = original.copy()
    inputs, labels = mask_tokens(original, VOCABULARY, np.random.default_rng(seed))
    chosen = labels != IGNORED
    assert np.array_equal(original, before)
    assert np.array_equal(inputs[~chosen], original[~chosen])
    assert np.array_equal(labels[chosen], original[chosen])
    assert (original[chosen] >= FIRST).all()
    assert (chosen.any(axis=1) == (original >= FIRST).any(axis=1)).all()
    assert ((inputs[chosen] == MASK) | (inputs[chosen] >= FIRST)).all()


SIZE = CharacterModelSize(layers=2, width=24, heads=3, length=12)


@pytest.fixture
def task() -> NextCharacterTask:
    return NextCharacterTask(
        next_character.encode("abcdefgh " * 300, "abcdefgh " * 20), SIZE, batch_size=3, validation_windows=10
    )


def test_no_place_sees_what_comes_after_it(task: NextCharacterTask) -> None:
    model = task.build_model(3)
    inputs = torch.randint(0, task.kinds, (2, SIZE.length), generator=torch.Generator().manual_seed(1))
    changed = inputs.clone()
    changed[:, 7] = (inputs[:, 7] + 1) % task.kinds
    before, after = model(inputs), model(changed)
    assert before.shape == (2, SIZE.length, task.kinds)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    assert (before[:, 11] != after[:, 11]).any()


def test_ranks_share_the_held_out_windows(task: NextCharacterTask) -> None:
    model = task.build_model(0)
    with torch.no_grad():
        shares = [task.validation_sum(model, rank, 3) for rank in range(3)]
        whole, _ = task.validation_sum(model, 0, 1)
    total, count = (sum(column) for column in zip(*shares, strict=True))
    assert count == 10 * SIZE.length
    assert total / count == pytest.approx(math.log(task.kinds), rel=0.2)
    assert total == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("layout", [BigBird(2, block=16), Fixed(2, block=16), BigBird(1, 16, num_global_blocks=2)])
def test_gathered_attention_is_the_layouts(layout: BigBird | Fixed) -> None:
    q, k, v = (torch.randn(2, 2, 160, 8, requires_grad=True) for _ in range(3))
    d_out = torch.randn(2, 2, 160, 8)
    expected = reference_attention(q, k, v, layout)
    found = gathered_attention(layout.index(160))(q, k, v)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out)
    )


@pytest.mark.parametrize("layout", [BigBird(2, 16), BigBird(2, 16, different_layout_per_head=True), Fixed(2, 16)])
def test_flex_has_the_same_blocks_both_ways(layout: BigBird | Fixed) -> None:
    index = layout.index(160)
    mask = flex_mask(index)
    assert torch.equal(mask.to_dense().bool()[0], index.dense())
    assert mask.kv_indices.device == index.columns.device
    columns = mask.full_q_num_blocks  # what a backward walks along
    assert torch.equal(columns[0].flatten(), index.column_offsets.diff())


def test_a_seed_decides_the_weights_where_ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who builds a model has torch's generator until it is built."""
    task, meeting, build = DigitsTask(4), threading.Barrier(2), nn.Conv2d

    def meet_and_build(*arguments: Any, **options: Any) -> nn.Module:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return build(*arguments, **options)

    monkeypatch.setattr(nn, "Conv2d", meet_and_build)
    for rank, model in enumerate(threads.run(lambda comm: task.build_model(comm.rank), 2)):
        for mine, alone in zip(model.parameters(), task.build_model(rank).parameters(), strict=True):
            assert torch.equal(mine, alone)
