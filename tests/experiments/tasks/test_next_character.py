"""Text as characters: numbered by how frequent they are, shared by all ranks, and predicted from those before."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from experiments.common.errors import InputError
from experiments.tasks.corpus import Corpus
from experiments.tasks.next_character import CharacterModelSize, NextCharacterTask, Text, encode, share_text
from thinwire.comm import Communicator, threads

SIZE = CharacterModelSize(layers=2, width=24, heads=3, length=12)


@pytest.fixture
def task() -> NextCharacterTask:
    return NextCharacterTask(encode("abcdefgh " * 300, "abcdefgh " * 20), SIZE, batch_size=3, validation_windows=10)


def test_frequent_characters_have_numbers_and_rare_ones_share_one() -> None:
    text = encode("b" * 6000 + "a" * 5999 + "é" * 2 + "z", "abéz")
    assert text.kinds == 4
    assert text.validation.tolist() == [2, 1, 3, 0]
    assert (text.training[:6000] == 1).all()


def test_as_many_characters_as_bytes_have_numbers_at_most() -> None:
    text = encode("".join(map(chr, range(0x4E00, 0x4E00 + 400))), "")
    assert text.kinds == 256
    assert text.training.max() == 255


def test_every_rank_gets_the_text_of_rank_0() -> None:
    def rank(comm: Communicator) -> Text:
        return share_text(comm, lambda: Corpus(["to be", "or not"], ["that is the question"]), 4)

    first, *others = threads.run(rank, 3)
    assert len(first.training) == len("to be\nor not")
    for other in others:
        assert other.kinds == first.kinds
        assert np.array_equal(other.training, first.training)
        assert np.array_equal(other.validation, first.validation)


def test_a_text_without_a_window_is_refused_on_every_rank() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(InputError, match="its held-out text has 3 characters, and a window takes 4"):
            share_text(comm, lambda: Corpus(["long enough"], ["abc"]), 4)

    threads.run(rank, 2)


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


def test_the_seed_decides_weights_and_batches(task: NextCharacterTask) -> None:
    one, same, other = (task.build_model(seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    model = task.build_model(5)
    losses = [task.training_loss(model, *key, 2).item() for key in ((0, 1, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0))]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_share_the_held_out_windows(task: NextCharacterTask, ranks: int) -> None:
    model = task.build_model(0)
    with torch.no_grad():
        shares = [task.validation_sum(model, rank, ranks) for rank in range(ranks)]
    total, count = (sum(column) for column in zip(*shares, strict=True))
    assert count == 10 * SIZE.length
    assert total / count == pytest.approx(math.log(task.kinds), rel=0.2)
    with torch.no_grad():
        assert total == pytest.approx(task.validation_sum(model, 0, 1)[0], rel=1e-5)


def test_it_can_be_learned(task: NextCharacterTask) -> None:
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        task.training_loss(model, 0, step, 0, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        total, count = task.validation_sum(model, 0, 1)
    # A text that repeats itself is known from its second character on.
    assert total / count < 0.2
