"""The study of long documents: what its command line refuses, and a whole run with tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.long_documents.__main__ import main
from experiments.long_documents.learning import SYSTEMS, LearningPlan, learners, train_in_turns
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens
from tests.experiments.helpers import write_text, written


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 6000)
    sizes = ["--model", "tiny", "--vocab-size", "120", "--document-length", "256", "--window", "64"]
    times = ["--start-steps", "2", "--minutes", "0.02", "--turns", "2", "--validation-documents", "2"]
    assert main(["--corpus", str(corpus), *sizes, *times, "--output", str(tmp_path)]) == 0
    found = written(tmp_path, "long_documents")
    fewest = min(run["curve"]["steps"][-1] for run in found["runs"].values())
    assert found["equal_steps"]["steps"] == fewest
    for name, run in found["runs"].items():
        assert run["tokens_seen"] == run["documents_seen"] * (64 if name == "truncated" else 256)
        assert found["equal_time"]["losses"][name] == run["curve"]["losses"][-1]
    assert found["findings"][1] in capsys.readouterr().out


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
