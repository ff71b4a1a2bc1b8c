"""The warmup: its exact steps are Adam's in float64, with bias correction and without, as are frozen ones after it. It
ends at a fixed step, or once the variance has settled and the learning rate no longer rises."""

import json
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.launching import on_threads
from tests.optim.subject import FREEZE, SUBJECTS, Subject
from tests.optim.training import make_model, train
from tests.pairwise import pairwise
from tests.refusing import refused
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import CodecName
from thinwire.optim import OneBitAdam, ZeroOneAdam, registry
from thinwire.optim.algorithm import make_freeze_rule
from thinwire.optim.exact import Adam, AdamW
from thinwire.zero import ShardedOptimizer

NUMEL, RANKS, LR, BETAS, EPS = 77, 2, 0.01, (0.8, 0.95), 1e-3
DECAY = 0.1


def gradient(rank: int, step: int) -> Tensor:
    """With no element near zero, where 0/1 Adam raises denominators."""
    generator = torch.Generator().manual_seed(50 * rank + step)
    signs = torch.where(torch.rand(NUMEL, generator=torch.Generator().manual_seed(9)) < 0.5, -1.0, 1.0)
    return signs * (0.5 + torch.rand(NUMEL, generator=generator))


class Reference:
    """Adam in float64."""

    def __init__(self, corrects: bool, decoupled: bool = True) -> None:
        self.corrects, self.decoupled = corrects, decoupled
        self.weights, self.m, self.v = np.ones(NUMEL), np.zeros(NUMEL), np.zeros(NUMEL)
        self.steps = 0

    def step(self, gradient: np.ndarray) -> None:
        self.steps += 1
        if self.decoupled:
            self.weights *= 1 - LR * DECAY
        else:
            gradient = gradient + DECAY * self.weights
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * gradient
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * gradient**2
        first, second = ((1 - beta**self.steps if self.corrects else 1.0) for beta in BETAS)
        self.weights -= LR * (self.m / first) / (np.sqrt(self.v / second) + EPS)

    def train(self, ranks: int, steps: int) -> np.ndarray:
        for step in range(steps):
            self.step(np.mean([gradient(rank, step).double().numpy() for rank in range(ranks)], axis=0))
        return self.weights


def step_through(optimizer: Any, parameter: Tensor, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (parameter * gradient(rank, step)).sum().backward()
        optimizer.step()


def make(
    optimizer_class: Any, comm: Communicator, stage: int, corrects: bool, freeze_step: int = 99
) -> tuple[Any, Tensor]:
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "comm": comm, "stage": stage}
    if optimizer_class in (Adam, AdamW):  # which make no correction
        return ShardedOptimizer([parameter], optimizer_class, block_size=8, **options), parameter
    options |= {"freeze_step": freeze_step} if optimizer_class is OneBitAdam else {}
    return optimizer_class([parameter], block_size=64, bias_correction=corrects, **options), parameter


EXACT = [
    *((OneBitAdam, stage, corrects, True) for stage in (0, 1, 2) for corrects in (True, False)),
    *((ZeroOneAdam, stage, corrects, True) for stage in (0, 1) for corrects in (True, False)),
    *((optimizer, stage, False, optimizer is AdamW) for stage in (0, 1, 2) for optimizer in (AdamW, Adam)),
]


@pytest.mark.parametrize(("optimizer_class", "stage", "corrects", "decoupled"), EXACT)
def test_exact_steps_are_adams(optimizer_class: Any, stage: int, corrects: bool, decoupled: bool) -> None:
    def body(comm: Communicator) -> Tensor:
        optimizer, parameter = make(optimizer_class, comm, stage, corrects)
        step_through(optimizer, parameter, comm.rank, range(7))
        return parameter.detach().clone()

    found = threads.run(body, RANKS)[0].numpy()
    np.testing.assert_allclose(found, Reference(corrects, decoupled).train(RANKS, 7), rtol=2e-6)
    assert np.abs(found - Reference(not corrects, decoupled).train(RANKS, 7)).max() > 1e-3


class RoundedAverage:
    """The average of all ranks' gradients through a codec, with error feedback on both legs, or the first alone."""

    def __init__(self, wire: CodecName, ranks: int, comes_back: bool) -> None:
        self.codec, self.ranks, self.comes_back = make_codec(wire, 64), ranks, comes_back
        self.shard = -(-NUMEL // (64 * ranks)) * 64
        self.lost = torch.zeros(ranks + 1, ranks * self.shard)  # by each worker, and by the owners together

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        padding = (0, self.ranks * self.shard - NUMEL)
        sent = [self._rounded(one, torch.nn.functional.pad(own, padding)) for one, own in enumerate(gradients)]
        average = torch.stack(sent).mean(0)
        return (self._rounded(self.ranks, average) if self.comes_back else average)[:NUMEL]

    def _rounded(self, who: int, vector: Tensor) -> Tensor:
        wanted = vector + self.lost[who]
        packets = torch.zeros(self.ranks, self.codec.packet_bytes(self.shard), dtype=torch.uint8)
        rounded = torch.empty_like(wanted)
        self.codec.encode(wanted.clone(), None, packets, NUMEL)
        self.codec.decode(packets, rounded, NUMEL)
        self.lost[who] = wanted - rounded
        return rounded


@pytest.mark.parametrize(("wire", "stage", "ranks"), pairwise(["int8", "int4"], [0, 1, 2], [1, 3, 4]))
def test_a_rounded_warmup_is_adam_on_what_came_back(wire: CodecName, stage: int, ranks: int) -> None:
    """Clipped by the norm of that, and with a loss scale that changes, which residuals follow. At stages 1 and 2 owners
    step by what came to them, and weights come back."""
    max_norm, scales = 5.0, [1.0, 1.0, 4.0, 4.0, 0.5, 0.5, 0.5]

    def body(comm: Communicator) -> Tensor:
        parameter = torch.nn.Parameter(torch.ones(NUMEL))
        options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "block_size": 64, "freeze_step": 99}
        optimizer = OneBitAdam([parameter], warmup_wire=wire, max_norm=max_norm, comm=comm, stage=stage, **options)
        for step, scale in enumerate(scales):
            optimizer.loss_scale = scale
            (parameter * gradient(comm.rank, step) * scale).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameter.detach().clone()

    average, reference = RoundedAverage(wire, ranks, stage == 0), Reference(corrects=True)
    for step in range(len(scales)):
        came_back = average([gradient(rank, step) for rank in range(ranks)])
        reference.step((came_back * min(1.0, max_norm / (came_back.norm() + 1e-6))).double().numpy())
    first, *others = threads.run(body, ranks)
    np.testing.assert_allclose(first.numpy(), reference.weights, rtol=5e-6)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("there", [0, 1])
@on_threads(2)
def test_residuals_of_a_rounded_warmup_cross_stages(comm: Communicator, there: int) -> None:
    """A worker's go on; stages 1 and 2 have none of owners, and leave or find them zero at stage 0."""
    first, second = (Subject("OneBitAdam", stage, "int4") for stage in (there, 1 - there))
    model, optimizer = first.on_model(comm, 3)
    parts = comm.all_gather_bytes(pickle.dumps(save(comm, optimizer)))
    resumed, again = second.on_model(comm, 2)
    again.load(join([pickle.loads(part) for part in parts]))
    before, after = (
        {key: one for key, one in found.rank_tensors().items() if key.startswith("warmup_worker")}
        for found in (optimizer, again)
    )
    assert before.keys() == after.keys()
    assert any(bool(one.any()) for one in before.values())
    assert all(torch.equal(one, after[key]) for key, one in before.items())
    owned = [one.tensor for one in again.saved_slices() if one.kind == "warmup_owner_residual"]
    assert bool(owned) == (there == 1)
    assert not any(bool(one.any()) for one in owned)
    losses = train(resumed, again, range(3, FREEZE + 4)), train(model, optimizer, range(3, FREEZE + 4))
    np.testing.assert_allclose(*losses, rtol=0.05)


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(RANKS)
def test_frozen_steps_move_by_what_the_ranks_agreed_on(comm: Communicator, stage: int, corrects: bool) -> None:
    optimizer, parameter = make(OneBitAdam, comm, stage, corrects, freeze_step=3)
    step_through(optimizer, parameter, comm.rank, range(4))
    assert optimizer.frozen
    for step in range(4, 7):
        before = parameter.detach().clone()
        step_through(optimizer, parameter, comm.rank, range(step, step + 1))
        update = torch.zeros(NUMEL)
        for one in optimizer.saved_slices():
            if one.kind in ("exp_avg", "momentum"):
                update[one.start : one.start + one.tensor.numel()] = one.tensor.view(-1)
        comm.all_reduce(update)
        assert bool(update.all())
        correction = 1 - BETAS[0] ** (step + 1) if corrects else 1.0
        expected = before * (1 - LR * DECAY) - LR * update / correction
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": True}, {"maximize": True}, {"amsgrad": True}])
def test_every_kernel_leaves_the_correction_out(kernel: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(2)]
    optimizer = AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **kernel)
    reference = Reference(False)
    for step in range(5):
        of_step = gradient(0, step)
        parameters[0].grad, parameters[1].grad = of_step.clone(), None
        optimizer.step()
        reference.step(of_step.double().numpy() * (-1 if "maximize" in kernel else 1))
    if "amsgrad" in kernel:
        assert set(optimizer.state[parameters[0]]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    else:
        np.testing.assert_allclose(parameters[0].detach().numpy(), reference.weights, rtol=2e-6)
    assert optimizer.state[parameters[0]]["step"] == 5
    assert bool((parameters[1] == 1).all())


def test_torchs_adamw_takes_up_its_state() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(2))
    one, other = AdamW([ours], lr=LR), torch.optim.AdamW([theirs], lr=LR)
    ours.grad = gradient(0, 0)
    one.step()
    other.load_state_dict(one.state_dict())
    assert other.state[theirs]["step"] == 1
    torch.testing.assert_close(other.state[theirs]["exp_avg_sq"], 0.001 * gradient(0, 0) ** 2)
    refused(ValueError, "Invalid", AdamW, [ours], betas=(1.0, 0.9))


# When it ends


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


# Not before the learning rate's highest


def warmed_up(optimizer: Any, steps: int, total: int = 300) -> LambdaLR:
    """A rate that rises over so many steps, and falls linearly to zero."""
    rise, fall = max(1, steps), max(1, total - steps)
    return LambdaLR(optimizer, lambda step: min(step / rise, 1.0, max(0.0, (total - step) / fall)) if steps else 1.0)


FREEZES = [subject for subject in SUBJECTS if subject.entry.freeze_option is not None]


@pytest.mark.parametrize("subject", FREEZES, ids=str)
@pytest.mark.parametrize(
    ("warmup", "step", "total", "message"),
    [
        (90, 60, 300, r"=60 freezes .*warmup, which rises until step 91.*Give \w+=91 or later"),
        (90, 90, None, r"=90 freezes .*warmup, which rises until step 91"),
        (30, 31, 300, r"=31 freezes .*too few of 300 steps.*Give \w+=60 or later"),
        (0, 1, 300, "=1 freezes .*too few of 300 steps"),
        (90, 91, 300, None),
        (90, 299, 300, None),
        (30, 60, 300, None),
        (100, 693, 100_000, None),
        (100, 692, 100_000, "Give .*=693 or later"),
        (0, 1, None, None),
    ],
)
@on_threads(1)
def test_a_freeze_comes_neither_in_the_warmup_nor_in_the_first_steps(
    comm: Communicator, subject: Subject, warmup: int, step: int, total: int | None, message: str | None
) -> None:
    optimizer = subject.build(make_model(), comm, **{str(subject.entry.freeze_option): step})
    schedule = warmed_up(optimizer, warmup, total or 300)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        optimizer.check_schedule(schedule, total)


@on_threads(2)
def test_a_freeze_after_the_end_is_told(comm: Communicator) -> None:
    optimizer = Subject("OneBitAdam", 0).build(make_model(), comm, freeze_step=300)
    told = pytest.warns(RuntimeWarning, match=r"300 comes after the end of this run of 300 steps")
    with nullcontext() if comm.rank else told:
        optimizer.check_schedule(None, 300)


@pytest.mark.parametrize("subject", FREEZES, ids=str)
@pytest.mark.parametrize(("warmup", "warns"), [(FREEZE, True), (FREEZE - 1, False), (0, False)])
def test_a_loop_that_freezes_while_the_rate_rises_is_warned(subject: Subject, warmup: int, warns: bool) -> None:
    def body(comm: Communicator) -> None:
        model, optimizer = subject.on_model(comm)
        schedule = warmed_up(optimizer, warmup)
        train(model, optimizer, range(FREEZE + 4), lambda _: schedule.step())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        threads.run(body, 2)
    told = [str(one.message) for one in found if "still rises" in str(one.message)]
    assert len(told) == warns
    assert all(f"after step {FREEZE}" in one and f"Give {subject.entry.freeze_option}=" in one for one in told)


# It can be set


@pytest.mark.parametrize("subject", FREEZES, ids=str)
@pytest.mark.parametrize("begun", [0, 2])
@on_threads(2)
def test_the_step_of_the_freeze_can_be_set_until_it_is_there(comm: Communicator, subject: Subject, begun: int) -> None:
    option = str(subject.entry.freeze_option)
    model, optimizer = subject.on_model(comm, begun)
    assert getattr(optimizer, option) == FREEZE
    for bad in (0, True, 2.5, "never", begun):
        refused(ValueError, rf"{option}|freeze_step", setattr, optimizer, option, bad)
    refused(ValueError, rf"{option} is [45] against [45] on rank 0", setattr, optimizer, option, 4 + comm.rank)
    assert getattr(optimizer, option) == FREEZE
    setattr(optimizer, option, 4)
    assert getattr(optimizer, option) == 4
    train(model, optimizer, range(begun, 8))
    assert optimizer.frozen_at == 4
    refused(RuntimeError, "frozen since step 4", setattr, optimizer, option, 20)


@pytest.mark.parametrize(("name", "key"), [("OneBitAdam", "adam_freeze_key"), ("OneBitLamb", "lamb_freeze_key")])
@on_threads(1)
def test_names_that_scripts_for_other_libraries_read(comm: Communicator, name: str, key: str) -> None:
    model, optimizer = Subject(name, 0).on_model(comm, 2)
    assert getattr(optimizer.optimizer, key) is False
    train(model, optimizer, range(FREEZE))
    assert getattr(optimizer.optimizer, key) is True


@on_threads(1)
def test_a_group_has_no_freeze_of_its_own(comm: Communicator) -> None:
    group = {"params": list(make_model().parameters()), "freeze_step": 3}
    refused(ValueError, "belongs to all parameter groups", OneBitAdam, [group], comm=comm)


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
