"""LAMB, Lion and QHAdamW against their formulas in float64, Muon against torch's own and AdamW, each on its part; and
sharded: every stage has the same bits, every parameter one owner, and what one job saved another takes up."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.launching import on_threads
from tests.optim.training import make_model, weights
from tests.zero.saved import join, save
from tests.zero.training import build, by_one_process, train
from thinwire.comm import Communicator, threads
from thinwire.optim import Lamb, Lion, Muon, QHAdamW
from thinwire.optim.muon import mark_matrices
from thinwire.zero import ShardedOptimizer

SHAPES = [(7, 5), (13,), (3, 2, 4), ()]
SETTINGS = [
    {},
    {"weight_decay": 0.1, "betas": (0.7, 0.9), "eps": 1e-3},
    {"bias_correction": False, "eps_inside_sqrt": True, "eps": 0.1},
    {"max_coeff": 0.6, "min_coeff": 0.5, "lr": 0.3},
]


def by_formula(weight: Tensor, gradients: list[Tensor], **given) -> tuple[Tensor, float]:
    """(The weight after all steps, the last trust ratio)."""
    settings = torch.optim.Adam([weight]).defaults | {"eps_inside_sqrt": False, "bias_correction": True} | given
    lr, betas, eps, decay = (settings[name] for name in ("lr", "betas", "eps", "weight_decay"))
    least, most = given.get("min_coeff", 0.01), given.get("max_coeff", 10.0)
    weight = weight.double()
    mean, variance, ratio = torch.zeros_like(weight), torch.zeros_like(weight), 1.0
    for step, gradient in enumerate((one.double() for one in gradients), 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        variance = betas[1] * variance + (1 - betas[1]) * gradient**2
        root = (variance + eps).sqrt() if settings["eps_inside_sqrt"] else variance.sqrt() + eps
        update = mean / root + decay * weight
        norms = float(weight.norm()), float(update.norm())
        ratio = min(max(norms[0] / norms[1], least), most) if all(norms) else 1.0
        corrected = math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step) if settings["bias_correction"] else 1.0
        weight = weight - lr * corrected * ratio * update
    return weight, ratio


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_of_lamb_are_those_of_its_formula(settings: dict) -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.zeros(6)))  # its norm says nothing
    begin = [one.detach().clone() for one in parameters]
    gradients = [[torch.randn(one.shape, generator=generator) for _ in range(9)] for one in parameters]
    optimizer = Lamb(parameters, **settings)
    for step in range(9):
        for parameter, of_parameter in zip(parameters, gradients, strict=True):
            parameter.grad = of_parameter[step].clone()
        optimizer.step()
    expected = [by_formula(one, of, **settings) for one, of in zip(begin, gradients, strict=True)]
    for parameter, (weight, _) in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), weight, rtol=2e-5, atol=2e-6)
    assert optimizer.get_lamb_coeffs() == pytest.approx([ratio for _, ratio in expected], rel=1e-4)


def test_parameters_without_a_gradient_stay_and_count_no_step() -> None:
    one, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = Lamb([{"params": [one, other]}], lr=0.1)
    for late in (False, False, True):
        one.grad = torch.ones(4)
        other.grad = torch.ones(4) if late else None
        optimizer.step()
        assert len(optimizer.get_lamb_coeffs()) == 1 + late
    assert torch.equal(other.detach(), by_formula(torch.ones(4), [torch.ones(4)], lr=0.1)[0].float())


def test_a_gradient_of_zero_moves_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    optimizer = Lamb([parameter])
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3))
    assert optimizer.get_lamb_coeffs() == [1.0]


def test_a_closure_is_called_with_gradients_on() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([parameter], lr=0.1)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert bool((parameter < 1).all())


def test_steps_of_lion_are_those_of_its_formulas() -> None:
    generator = torch.Generator().manual_seed(2)
    parameter, idle = torch.nn.Parameter(torch.randn(5, 3, generator=generator)), torch.nn.Parameter(torch.ones(2))
    weight, momentum = parameter.detach().double(), torch.zeros(5, 3, dtype=torch.float64)
    optimizer = Lion([parameter, idle], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for _ in range(7):
        gradient = torch.randn(5, 3, generator=generator)
        parameter.grad = gradient
        optimizer.step()
        direction = (0.8 * momentum + 0.2 * gradient).sign()
        weight = (1 - 0.01 * 0.1) * weight - 0.01 * direction
        momentum = 0.95 * momentum + 0.05 * gradient
    torch.testing.assert_close(parameter.detach().double(), weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(idle.detach(), torch.ones(2))


@pytest.mark.parametrize(
    "given",
    [{}, {"betas": (0.9, 0.99), "omega": 0.6, "weight_decay": 0.1, "eps": 1e-3}, {"omega": 0.0}, {"omega": 1.0}],
)
def test_steps_of_qhadamw_are_those_of_its_formulas(given: dict) -> None:
    """With omega = 1 of torch's AdamW."""
    settings = {"lr": 0.01, "betas": (0.995, 0.999), "omega": 0.9, "eps": 1e-8, "weight_decay": 0.0} | given
    lr, (beta1, beta2), omega, eps, decay = settings.values()
    generator = torch.Generator().manual_seed(4)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    exact = [one.detach().double() for one in ours]
    moments = [[torch.zeros_like(one), torch.zeros_like(one)] for one in exact]
    optimizer = QHAdamW([{"params": ours[:2]}, {"params": ours[2:]}], **{"lr": 0.01} | given)
    of_torch = [nn.Parameter(one.clone()) for one in exact]
    plain = torch.optim.AdamW(of_torch, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    for step in range(1, 41):
        for number, (one, weight) in enumerate(zip(ours, exact, strict=True)):
            one.grad = torch.randn(one.shape, generator=generator)
            gradient = one.grad.double()
            of_torch[number].grad = gradient
            mean, variance = moments[number]
            mean.mul_(beta1).add_((1 - beta1) * gradient)
            variance.mul_(beta2).add_((1 - beta2) * gradient**2)
            direction = (1 - omega) * gradient + omega * mean / (1 - beta1**step)
            weight.mul_(1 - lr * decay).sub_(lr * direction / ((variance / (1 - beta2**step)).sqrt() + eps))
        optimizer.step()
        plain.step()
    for one, weight, other in zip(ours, exact, of_torch, strict=True):
        assert float((one.detach().double() - weight).norm() / weight.norm()) < 1e-6
        assert omega < 1 or torch.allclose(weight, other.detach(), rtol=1e-9, atol=1e-9)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv1d(6, 4, 3)
        self.wide = nn.Linear(4, 9)
        self.lm_head = nn.Linear(9, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.convolution(self.embedding(tokens).mT).mT
        return self.lm_head(torch.tanh(self.wide(hidden)))


def make_language_model() -> Model:
    torch.manual_seed(7)
    return Model()


def train_language_model(model: Model, *optimizers: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        tokens = torch.randint(0, 11, (5, 8), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[:, 2:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "settings", [{"lr": 0.05}, {"muon_lr": 0.03, "adam_lr": 2e-3, "weight_decay": 0.1, "fused": True}, {}]
)
def test_it_is_torchs_muon_and_adamw(settings: dict) -> None:
    model, other = make_language_model(), make_language_model()
    mark_matrices(model.named_parameters())
    train_language_model(model, Muon(model.parameters(), ns_dtype="bf16", **settings))

    kernel = other.convolution.weight
    matrix = kernel.detach().view(4, -1)  # a matrix of its own, that shares the kernel's memory
    decay = settings.get("weight_decay", 0.0)
    muon_lr = settings.get("muon_lr", settings.get("lr", 0.02))
    adam_lr = settings.get("adam_lr", settings.get("lr", 3e-4))
    muon = torch.optim.Muon([matrix, other.wide.weight], lr=muon_lr, weight_decay=decay)
    rest = [one for name, one in other.named_parameters() if one is not kernel and name != "wide.weight"]
    adam = torch.optim.AdamW(
        rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=decay, fused=settings.get("fused")
    )

    class Bridge(torch.optim.SGD):
        def step(self, closure=None) -> None:
            matrix.grad = kernel.grad.view_as(matrix)

    train_language_model(other, Bridge([kernel], lr=0.0), muon, adam)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_groups() -> None:
    model = make_language_model()
    mark_matrices(model.named_parameters())
    optimizer = Muon(model.parameters(), lr=0.1, adam_lr=0.2, momentum=0.8)
    matrices, rest = optimizer.param_groups
    assert {id(one) for one in matrices["params"]} == {id(model.convolution.weight), id(model.wide.weight)}
    assert (matrices["use_muon"], matrices["lr"], matrices["momentum"]) == (True, 0.1, 0.8)
    assert (rest["use_muon"], rest["lr"]) == (False, 0.2)
    assert len(matrices["params"]) + len(rest["params"]) == len(list(model.parameters()))
    for state in (optimizer.state[one] for one in optimizer.state):
        assert not state
    given = [{"params": model.wide.parameters(), "lr": 0.5}, {"params": [model.lm_head.bias], "use_muon": False}]
    assert [(len(one["params"]), one["lr"]) for one in Muon(given).param_groups] == [(1, 0.5), (1, 0.5), (1, 3e-4)]


def test_what_the_user_has_marked_holds() -> None:
    model = make_language_model()
    model.embedding.weight.use_muon = True
    model.wide.weight.use_muon = False
    mark_matrices(model.named_parameters())
    matrices = Muon(model.parameters()).param_groups[0]["params"]
    assert {id(one) for one in matrices} == {id(model.embedding.weight), id(model.convolution.weight)}


def test_state_goes_through_a_state_dict() -> None:
    model, other = make_language_model(), make_language_model()
    first = Muon(model.parameters(), lr=0.1)
    train_language_model(model, first)
    other.load_state_dict(model.state_dict())
    second = Muon(other.parameters(), lr=0.7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch shares its memory
    train_language_model(model, first)
    train_language_model(other, second)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        (Lamb, {"lr": -1.0}, "lr must be at least 0, got -1"),
        (Lamb, {"eps": math.nan}, "eps must be at least 0, got nan"),
        (Lamb, {"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff must be at least min_coeff, 2.0, got 1.0"),
        (Lion, {"lr": -1.0}, "lr must be"),
        (Lion, {"weight_decay": -0.1}, "weight_decay must be"),
        (Lion, {"betas": (1.0, 0.5)}, "betas must be"),
        (QHAdamW, {"omega": 1.1}, "omega must be from 0 to 1, got 1.1"),
        (QHAdamW, {"betas": (0.9, 1.0)}, "betas must be"),
        (Muon, {"lr": -1.0}, "lr must be at least 0"),
        (Muon, {"lr": "0.1"}, "lr must be at least 0, got '0.1'"),
        (Muon, {"betas": 0.9}, "betas must be two numbers from 0 to below 1, got 0.9"),
        (Muon, {"ns_steps": 0}, "ns_steps must be a whole number from 1 to 99, got 0"),
        (Muon, {"betas": (0.9,)}, "betas must be two numbers"),
        (Muon, {"betas": (0.9, "x")}, "betas must be two numbers"),
        (Muon, {"nesterov": "no"}, "nesterov must be true or false, got 'no'"),
    ],
)
def test_what_cannot_work(optimizer: type, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer([nn.Parameter(torch.ones(2, 2))], **settings)


def test_a_vector_is_no_matrix() -> None:
    marked = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="use_muon must be true or false, of a group as of a parameter, got 'no'"):
        Muon([{"params": [marked], "use_muon": "no"}])
    marked.use_muon = "no"
    with pytest.raises(ValueError, match="use_muon must be true or false"):
        Muon([marked])
    with pytest.raises(ValueError, match="fewer than two dimensions: set its attribute use_muon to False"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}])


# Sharded


LAMB = {"optimizer_class": Lamb, "lr": 1e-2, "weight_decay": 0.1}
MUON = {"optimizer_class": Muon, "muon_lr": 1e-2, "adam_lr": 3e-3, "weight_decay": 0.1}
LION = {"optimizer_class": Lion, "lr": 1e-3, "weight_decay": 0.1}
QHADAMW = {"optimizer_class": QHAdamW, "lr": 1e-3, "weight_decay": 0.1}
ALL = pytest.mark.parametrize("options", [LAMB, MUON, LION, QHADAMW], ids=["Lamb", "Muon", "Lion", "QHAdamW"])


@ALL
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_accumulation_and_clipping_are_those_of_one_process(stage: int, options: dict) -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, max_norm=0.5, **options)
        train(optimizer, model, range(6), accumulation=2)
        return weights(model)

    expected = by_one_process(3, 6, accumulation=2, max_norm=0.5, **options)
    # Lion takes signs: a difference in the last bit becomes a part of a step.
    tolerance = {"Lamb": 2e-6, "Muon": 2e-5, "Lion": 2.1e-3, "QHAdamW": 2e-5}[options["optimizer_class"].__name__]
    for mine in threads.run(body, 3):
        torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_every_parameter_lies_whole_at_one_owner(stage: int, options: dict) -> None:
    def body(comm: Communicator) -> tuple[set[str], int]:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=torch.bfloat16, **options)
        train(optimizer, model, range(2))
        whole = {name: one.numel() for name, one in model.named_parameters()}
        kinds = {"master", "exp_avg", "exp_avg_sq", "momentum_buffer"}
        state = [one for one in optimizer.saved_slices() if one.kind in kinds]
        vectors = () if options is LAMB else {name for name in whole if "bias" in name}  # which AdamW steps in parts
        state = [one for one in state if one.name not in vectors]
        assert all(one.tensor.numel() == whole[one.name] and one.start == 0 for one in state)
        owned = {one.name for one in state if one.kind == "master"}
        assert owned == {one.name for one in state}
        return owned, sum(whole[name] for name in owned)

    of_rank = threads.run(body, 2)
    names = [name for owned, _ in of_rank for name in owned]
    known = [name for name, _ in make_model().named_parameters() if options is LAMB or "bias" not in name]
    assert sorted(names) == sorted(known)
    assert max(held for _, held in of_rank) < 0.7 * sum(held for _, held in of_rank)


@ALL
def test_what_one_job_saved_another_takes_up(options: dict) -> None:
    def first_half(comm: Communicator, stage: int):
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=torch.bfloat16, **options)
        train(optimizer, model, range(5))
        parts = save(comm, optimizer)
        train(optimizer, model, range(5, 9))
        return parts, weights(model)

    outcomes = threads.run(lambda comm: first_half(comm, 1), 3)
    saved, expected = join([part for part, _ in outcomes]), outcomes[0][1]

    def take_up(comm: Communicator, stage: int):
        model = make_model(seed=5)
        optimizer = build(comm, model, stage, param_dtype=torch.bfloat16, **options)
        optimizer.load(saved)
        parts = save(comm, optimizer)
        train(optimizer, model, range(5, 9))
        return parts, weights(model)

    for ranks, stage in ((3, 0), (3, 2), (1, 0), (2, 1), (4, 2)):
        outcomes = threads.run(lambda comm, stage=stage: take_up(comm, stage), ranks)
        again = join([part for part, _ in outcomes])
        assert again.kinds() == saved.kinds()
        for kind in saved.kinds():
            assert again.names(kind) == saved.names(kind)
            for name in saved.names(kind):
                numel = sum(one.tensor.numel() for one in saved._tensors[kind, name])
                assert torch.equal(again.read(kind, name, 0, numel), saved.read(kind, name, 0, numel))
        if ranks == 3:
            assert all(torch.equal(mine, expected) for _, mine in outcomes)


@pytest.mark.parametrize("options", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_a_parameter_without_a_gradient_is_left_alone_at_its_owner(options: dict) -> None:
    def body(comm: Communicator, stage: int) -> list[Tensor]:
        model = make_model()
        unused = nn.Parameter(torch.ones(9, 4))
        model.register_parameter("unused", unused)
        optimizer = build(comm, model, stage, **options)
        train(optimizer, model, range(3))
        assert torch.equal(unused.detach(), torch.ones(9, 4))
        return [one.detach().clone() for one in model.parameters()]

    stages = [threads.run(lambda comm, stage=stage: body(comm, stage), 2) for stage in (0, 1, 2)]
    for of_rank in stages:
        for mine in of_rank:
            assert all(torch.equal(one, other) for one, other in zip(mine, stages[0][0], strict=True))


def test_groups_of_muon_are_made_before_they_are_sharded() -> None:
    model = make_model()
    optimizer = ShardedOptimizer(model.parameters(), Muon, comm=threads.single(60.0), lr=0.1)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    vectors = [{"params": [model[0].bias], "use_muon": True}]
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        ShardedOptimizer(vectors, Muon, comm=threads.single(60.0), lr=0.1)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(3)
def test_the_torch_optimizer_of_a_rank_can_be_looked_at(comm: Communicator, stage: int) -> None:
    """Where the model is smaller than a block for each, the last one shows the class and settings alone."""
    model = nn.Linear(5, 3)
    optimizer = ShardedOptimizer(model.parameters(), Lamb, stage=stage, comm=comm, lr=0.5)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    shown = optimizer.optimizer
    assert type(shown) is Lamb
    coefficients = shown.get_lamb_coeffs()
    assert all(0.01 <= one <= 10 for one in coefficients)
    assert len(coefficients) == len(shown.state_dict()["state"]) == (2 if stage == 0 else (1, 1, 0)[comm.rank])
    assert [group["lr"] for group in shown.state_dict()["param_groups"]] == [0.5]
