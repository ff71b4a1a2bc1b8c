"""BERT on long documents: what each system sees, and what is compared with what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.long_documents.learning import SYSTEMS, DocumentCurve, LearningPlan, learners, train_in_turns
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens

LENGTH, WINDOW, VOCABULARY = 64, 16, 50
PLAN = LearningPlan(
    start_steps=2,
    windows_a_step=2,
    documents_a_step=2,
    learning_rate=1e-3,
    warmup_steps=4,
    weight_decay=0.01,
    window=WINDOW,
    block=16,
    seed=3,
)


@pytest.fixture
def tokens() -> Tokens:
    random = np.random.default_rng(7)
    training, validation = (random.integers(5, VOCABULARY, (count, LENGTH)).astype(np.int32) for count in (9, 3))
    return Tokens(VOCABULARY, training, validation, None)


def test_systems_start_from_the_same_weights(tokens: Tokens) -> None:
    systems = learners(BertSize(1, 32, 2), tokens, PLAN)
    assert tuple(systems) == SYSTEMS
    weights = [dict(learner.model.state_dict()) for learner in systems.values()]
    for name, weight in weights[0].items():
        assert all(torch.equal(weight, other[name]) for other in weights[1:])
    # A layout of four blocks of 16 misses little: losses of the same labels are close, and those of windows are others.
    sparse, dense, truncated = (learner.validate() for learner in systems.values())
    assert sparse == pytest.approx(dense, rel=1e-2)
    assert truncated != dense


def test_the_start_repeats_the_positions_of_a_window(tokens: Tokens) -> None:
    started, untrained = (
        learners(BertSize(1, 32, 2), tokens, replace(PLAN, start_steps=steps))["dense"] for steps in (3, 0)
    )
    positions = started.model.bert.embeddings.position_embeddings.weight
    assert positions.shape[0] == LENGTH
    assert torch.equal(positions[:WINDOW], positions[WINDOW : 2 * WINDOW])
    assert not torch.equal(positions, untrained.model.bert.embeddings.position_embeddings.weight)
    assert started.steps == 0


def test_the_truncated_system_sees_no_more_than_its_window(tokens: Tokens) -> None:
    plan = replace(PLAN, start_steps=0)
    learner = learners(BertSize(1, 32, 2), tokens, plan)["truncated"]
    changed = tokens.training.copy()
    changed[:, WINDOW:] = 6
    other = learners(BertSize(1, 32, 2), replace(tokens, training=changed), plan)["truncated"]
    lengths = []
    learner.model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape))
    for one in (learner, other):
        one.train(0.0)
    assert lengths == [(2, WINDOW)]
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(learner.model.parameters(), other.model.parameters(), strict=True)
    )
    learner.validate()
    assert set(lengths[1:]) == {(LENGTH // WINDOW, WINDOW)}


def test_first_tokens_are_a_part_of_the_whole(tokens: Tokens) -> None:
    learner = learners(BertSize(1, 32, 2), tokens, PLAN)["truncated"]
    assert learner.validate(LENGTH) == pytest.approx(learner.validate())
    assert learner.validate(WINDOW) != pytest.approx(learner.validate())


def test_turns_share_the_time_and_warming_up_moves_nothing(tokens: Tokens) -> None:
    systems = learners(BertSize(1, 32, 2), tokens, PLAN)
    before = systems["dense"].validate()
    train_in_turns(systems, 0.3, 3)
    for learner in systems.values():
        assert learner.seconds >= 0.3
        assert learner.curve.steps[0] == 0
        assert len(learner.curve.losses) == 4
        assert learner.curve.steps == sorted(learner.curve.steps)
        assert learner.curve.steps[-1] == learner.steps >= 3
    assert systems["dense"].curve.losses[0] == pytest.approx(before)


def test_losses_between_points_lie_on_the_line() -> None:
    curve = DocumentCurve(steps=[0, 10, 20], seconds=[0.0, 1.0, 2.0], losses=[6.0, 4.0, 3.0])
    assert curve.at_step(10) == 4
    assert curve.at_step(5) == 5
    assert curve.at_step(15) == 3.5


def test_the_rate_rises_and_stays() -> None:
    assert [PLAN.rate_at(step) for step in (0, 3, 1000)] == [2.5e-4, 1e-3, 1e-3]
