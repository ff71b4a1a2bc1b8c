"""When the variance is frozen: at a fixed step, or once it has settled and the learning rate no longer rises."""

from __future__ import annotations

import json

import pytest

from tests.optim.subject import Subject
from tests.optim.training import make_model, train
from thinwire.comm import Communicator, threads
from thinwire.optim import registry
from thinwire.optim.algorithm import make_freeze_rule


def first_freeze(norms_at, rate_at=lambda step: 1.0, limit=20000, freeze_step="auto"):
    """`norms_at`: of one tensor, or of several."""
    rule = make_freeze_rule(freeze_step, 0.999)

    def norms(step):
        found = norms_at(step)
        return list(found) if isinstance(found, list) else [found]

    for step in range(1, limit):
        if rule.reached(step, [rate_at(step)], lambda step=step: norms(step)):
            return step
    return None


@pytest.mark.parametrize(
    ("norms_at", "options", "frozen_at"),
    [
        pytest.param(lambda step: 1.0, {"freeze_step": 37}, 37, id="a fixed step"),
        pytest.param(lambda step: 5.0, {}, 30 + 50, id="a constant variance, once it has held for 50 steps"),
        pytest.param(lambda step: 1.0, {"rate_at": lambda step: min(step, 105)}, 160, id="a learning rate that rises"),
        pytest.param(lambda step: [0.0] * 9 + [1.0], {}, 80, id="tensors without a gradient do not count"),
        pytest.param(lambda step: [0.0] * 9 + [1.03**step], {"limit": 2000}, None, id="and the other one moves"),
        pytest.param(lambda step: 0.0, {"limit": 2000}, None, id="a variance of zero"),
        pytest.param(lambda step: 0.98**step, {"limit": 3000}, None, id="a variance that falls"),
        pytest.param(lambda step: 1.03**step, {"limit": 3000}, None, id="a variance that rises"),
    ],
)
def test_when_it_freezes(norms_at, options, frozen_at) -> None:
    assert first_freeze(norms_at, **options) == frozen_at


def test_a_plateau_that_one_large_tensor_hides_is_not_mistaken_for_settled() -> None:
    """As in BERT pretraining: after a plateau most tensors grow by much, and the total, an embedding, by little."""

    def norms(step):
        awake = 3.0 ** min(3.0, max(0.0, step - 200) / 50)  # 27 times from step 200 to 350
        return [100.0, *[0.1 * awake] * 5, *[0.1] * 2]

    total_moves_by = sum(norms(350)) / sum(norms(200))
    assert total_moves_by < 1.2
    assert 350 < first_freeze(norms, rate_at=lambda step: min(step, 190)) < 600


def test_queries_and_keys_that_awake_are_waited_for() -> None:
    """BERT-mini from step 130 on: a sixth of the tensors grow by a hundred, and the others hold still."""

    def norms(step):
        awake = 100.0 ** min(1.0, max(0.0, step - 130) / 100)
        return [*[1.0] * 60, *[1e-3 * awake] * 12]

    def with_half_of_them(step):
        return [*norms(130)[:66], *norms(step)[66:]]

    assert first_freeze(norms, lambda step: min(step, 120)) > 230
    assert first_freeze(with_half_of_them, lambda step: min(step, 120)) < 200


def test_gradients_that_fall_before_a_plateau_are_not_settled() -> None:
    """Most tensors shrink fast, while the total, one embedding, hardly does; they come back by a factor of ten."""

    def norms(step):
        others = 0.8 ** (min(step, 200) / 20) * (1.0 if step < 200 else min(10.0, 1.03 ** (step - 200)))
        return [50.0, *[others] * 6]

    frozen_at = first_freeze(norms, rate_at=lambda step: min(step, 60))
    assert frozen_at is not None
    assert frozen_at > 200


def test_growth_with_the_step_number_does_not_keep_it_from_freezing() -> None:
    """As most tensors of a transformer do for the whole run."""
    assert first_freeze(lambda step: [float(step)] * 4 + [1.0]) <= 200


def test_late_in_a_long_run_it_is_the_papers_bound() -> None:
    """At step 50,000, with a memory of 1000 steps, 4% in these is settled and 5% is not."""
    for growth, settled in ((1.039, True), (1.06, False)):
        rule = make_freeze_rule("auto", 0.999)
        frozen = False
        for step in range(48_000, 53_000):
            norms = [growth ** (step / 1000)] * 3
            frozen = frozen or rule.reached(step, [1.0], lambda norms=norms: norms)
        assert frozen == settled


def test_a_checkpoint_with_the_total_alone_is_looked_at_anew() -> None:
    rule = make_freeze_rule("auto", 0.999)
    rule.load({"norms": {"160": 3.0, "200": 3.1}, "previous_rates": [0.5], "settled_since": 160})
    frozen = [step for step in range(201, 400) if rule.reached(step, [0.5], lambda: [1.0, 2.0])]
    assert 270 < frozen[0] < 360


def test_the_rule_continues_from_its_state() -> None:
    whole = first_freeze(lambda step: 1.0 + 50.0 / step)
    rules = make_freeze_rule("auto", 0.999), make_freeze_rule("auto", 0.999)
    frozen = []
    for step in range(1, whole + 1):
        if step == whole // 2:
            rules[1].load(json.loads(json.dumps(rules[0].state())))
        rule = rules[step >= whole // 2]
        frozen.append(rule.reached(step, [1.0], lambda step=step: [1.0 + 50.0 / step]))
    assert frozen == [False] * (whole - 1) + [True]


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb"])
def test_auto_freezes_at_one_step_on_every_rank_at_every_stage_resumed_or_not(name: str) -> None:
    # Next to no learning rate: gradients whose variance settles.
    options = {"freeze_step": "auto", "betas": (0.9, 0.9), "lr": 1e-6}

    def body(comm: Communicator, stage: int) -> list[int | None]:
        models = [make_model() for _ in range(2)]
        optimizer, resumed = (Subject(name, stage).build(model, comm, **options) for model in models)
        train(models[0], optimizer, range(20))
        resumed.load_state_dict(optimizer.state_dict())
        for one, model in zip((optimizer, resumed), models, strict=True):
            train(model, one, range(20, 60))
        return [optimizer.frozen_at, resumed.frozen_at]

    found = [threads.run(lambda comm, s=stage: body(comm, s), 2) for stage in registry.entry(name).stages]
    taken = {step for ranks in found for of_rank in ranks for step in of_rank}
    assert len(taken) == 1
    assert taken.pop() > 20
