"""Dropping on plain stacks: no cost, no bias, exact gradients, evaluation untouched, and undrop; and refusals."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pld.models import WIDTH, Residual, Stack, batch, hugging_face, make_stack, settled
from tests.refusing import refused
from thinwire.pld import ProgressiveLayerDrop, drop_layers, keep_probability, undrop


@pytest.mark.filterwarnings("error")
def test_a_schedule_that_stands_still_is_a_warning() -> None:
    model, schedule = make_stack(), ProgressiveLayerDrop()
    drop_layers(model, schedule)
    model.eval()
    model(batch(0))
    model.train()
    with pytest.warns(RuntimeWarning, match=r"none is: call schedule.update_state\(step\) as every step begins"):
        model(batch(0))
    model(batch(1))
    for begin in (lambda one: one.update_state(0), lambda one: one.load_state_dict({"step": 0})):
        begun, schedule = make_stack(), ProgressiveLayerDrop()
        drop_layers(begun, schedule)
        begin(schedule)
        begun(batch(0))


def test_a_dropped_layer_costs_nothing() -> None:
    model, schedule = make_stack(), settled()
    handle = drop_layers(model, schedule, seed=2)
    model(batch(0))  # tries the layers out
    for step in range(2, 60):
        schedule.update_state(step)
        for layer in model.layers:
            layer.forwards = layer.backwards = 0
        model.zero_grad()
        model(batch(step)).sum().backward()
        dropped = {id(parameter) for parameter in handle.dropped_parameters()}
        for layer in model.layers:
            gone = id(layer.up.weight) in dropped
            assert layer.forwards == layer.backwards == (0 if gone else 1)
            assert all((parameter.grad is None) == gone for parameter in layer.parameters())
        assert model.embed.weight.grad is not None
    assert all(0.3 < rate < 1 for rate in handle.keep_rates)


def test_parameters_that_learn_hang_in_the_graph_of_a_layer_that_was_dropped() -> None:
    layer = Residual()
    layer.norm.weight.requires_grad_(False)
    layer.register_parameter("absent", None)
    layer.register_module("nothing", None)
    layer.deeper = nn.Sequential(nn.Linear(2, 2, bias=False), layer.down)
    drop_layers([layer], settled(theta=0.0))
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    output = layer(hidden)  # without it torch before 2.13 lets its node of the graph go
    assert {id(edge.variable) for edge, _ in output.grad_fn.next_functions if edge is not None} == {
        id(tensor) for tensor in (hidden, *layer.parameters()) if tensor.requires_grad
    }


@pytest.mark.parametrize("in_tuple", [False, True])
def test_a_kept_branch_is_scaled_and_gradients_are_exact(in_tuple: bool) -> None:
    model = make_stack(1, in_tuple=in_tuple).double()
    plain = copy.deepcopy(model)
    schedule = settled()
    handle = drop_layers(model, schedule, seed=1)
    for step in range(1, 12):
        schedule.update_state(step)
        inputs = batch(step).double().requires_grad_()
        same = inputs.detach().clone().requires_grad_()
        model.zero_grad()
        plain.zero_grad()
        output = model(inputs)
        dropped = {id(parameter) for parameter in handle.dropped_parameters()}
        hidden = plain.embed(same)
        for number, (layer, twin) in enumerate(zip(model.layers, plain.layers, strict=True), start=1):
            if id(layer.up.weight) not in dropped:
                branch = twin.down(torch.tanh(twin.up(twin.norm(hidden))))
                hidden = hidden + branch / keep_probability(number, 4, 0.5)
        expected = plain.head(hidden)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(inputs.grad, same.grad)
        for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (twin.grad is None)
            torch.testing.assert_close(parameter.grad, twin.grad)


def test_theta_one_changes_nothing_to_the_bit_nor_does_evaluation() -> None:
    model = make_stack(3)
    expected = model(batch(0))
    drop_layers(model, settled(1.0))
    assert torch.equal(model(batch(0)), expected)
    undrop(model.eval())
    handle = drop_layers(model, settled(0.0))
    assert torch.equal(model(batch(0)), expected)
    assert all(math.isnan(rate) for rate in handle.keep_rates)
    assert handle.dropped_parameters() == []


def test_empty_and_non_finite_batches_and_no_gradients() -> None:
    model = make_stack()
    handle = drop_layers(model, settled(0.0))
    with torch.no_grad():
        assert model(batch(0, rows=0)).shape == (0, 3)
        assert bool(model(batch(0) * math.nan).isnan().all())
    assert handle.dropped_parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    model = make_stack().to(dtype)
    schedule = settled()
    drop_layers(model, schedule)
    for step in range(1, 6):
        schedule.update_state(step)
        output = model(batch(step).to(dtype))
        assert output.dtype == dtype
        assert bool(output.isfinite().all())
    cast = make_stack()
    drop_layers(cast, settled())
    with torch.autocast("cpu", dtype):
        for micro in range(6):
            cast(batch(micro)).float().sum().backward()


def test_names_state_dict_and_signature_stay() -> None:
    model = make_stack()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    signature = inspect.signature(model.layers[0].forward)
    drop_layers(model, settled())
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    assert inspect.signature(model.layers[0].forward) == signature


def test_undrop_restores_the_model_and_a_forward_of_ones_own() -> None:
    model = make_stack()
    expected = model(batch(0))
    before = [dict(layer.__dict__) for layer in model.layers]
    drop_layers(model, settled(0.0))
    refused(ValueError, "undrop", drop_layers, model, settled())
    undrop(model)
    assert torch.equal(model(batch(0)), expected)
    assert [layer.__dict__.keys() for layer in model.layers] == [one.keys() for one in before]
    refused(ValueError, "no layer here", undrop, model)
    layer = model.layers[0]
    own = layer.forward
    layer.forward = mine = lambda hidden: own(hidden) * 1.0
    drop_layers(model.layers, settled())
    model(batch(0))
    undrop(model.layers)
    assert layer.forward is mine


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_runs_its_own_weights(how: str) -> None:
    model = make_stack()
    schedule = settled()
    drop_layers(model, schedule, seed=3)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert bool((model(batch(1)) != 0).any())
    assert not bool(twin(batch(1)).any())
    undrop(twin)
    assert "forward" in model.layers[0].__dict__
    assert "forward" not in twin.layers[0].__dict__


def test_resume_draws_what_would_have_been_drawn() -> None:
    def train(model: Stack, schedule: ProgressiveLayerDrop, steps: range) -> list[torch.Tensor]:
        outputs = []
        for step in steps:
            schedule.update_state(step)
            outputs += [model(batch(step, micro)).detach() for micro in range(2)]
        return outputs

    whole, schedule = make_stack(), ProgressiveLayerDrop(0.2, 0.3)
    first = drop_layers(whole, schedule, seed=77)
    train(whole, schedule, range(9))
    state = first.state_dict()
    expected = train(whole, schedule, range(9, 30))

    resumed, schedule = make_stack(), ProgressiveLayerDrop(0.2, 0.3)
    drop_layers(resumed, schedule, seed=1).load_state_dict(state)
    assert schedule.step == 8
    for mine, theirs in zip(train(resumed, schedule, range(9, 30)), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("change", [{"schedule": None}, {"schedule": {"step": -1}}, {"seed": None}, {"more": 1}])
def test_another_state_is_refused_and_nothing_changes(change: dict[str, object]) -> None:
    dropped = drop_layers(make_stack(), ProgressiveLayerDrop(0.2, 0.3), seed=1)
    before = dropped.state_dict()
    with pytest.raises((ValueError, TypeError), match=r"state of layer drop|from 0|seed"):
        dropped.load_state_dict({"seed": 5, "schedule": {"step": 4}} | change)
    assert dropped.state_dict() == before


def test_micro_steps_draw_apart_and_seeds_too() -> None:
    def outputs(seed: int, micro_steps: int) -> torch.Tensor:
        model = make_stack()
        drop_layers(model, settled(), seed=seed)
        return torch.stack([model(batch(0)).detach() for _ in range(micro_steps)])

    assert len({tuple(one.flatten().tolist()) for one in outputs(0, 20)}) > 3
    assert not torch.equal(outputs(0, 20), outputs(1, 20))
    assert torch.equal(outputs(0, 20), outputs(0, 20))


def test_the_global_generator_is_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.5, norm_first=True)
    schedule = settled(0.0)  # the only layer of one: always dropped
    drop_layers([layer], schedule)
    state = torch.get_rng_state()
    layer(torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.programs
def test_ddp_waits_for_no_dropped_layer(jobs) -> None:
    done = jobs.torchrun(2, "-m", "tests.pld.ddp_program", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held" in done.stdout


# What cannot be dropped is refused, with the reason: at the call if the layer shows it, else at its first run

SCHEDULE = ProgressiveLayerDrop()


def named(name: str) -> nn.Module:
    model = nn.Module()
    model.add_module(name, nn.ModuleList([Residual()]))
    return model


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *(
            (
                lambda name=name: hugging_face(name),
                ValueError,
                "post-LN: its output.* comes after the residual sum.*pre-LN",
            )
            for name in ("bert", "roberta", "distilbert")
        ),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2), ValueError, "norm_first=False"),
        (lambda: named("towers"), ValueError, "'layers', 'layer', 'h', 'blocks', 'block'"),
        (nn.ModuleList, ValueError, "empty"),
        (lambda: [3], TypeError, "a layer is a module, not int"),
        (
            lambda: nn.Transformer(8, 2, 1, 1, 8),
            ValueError,
            r"several stacks of layers: encoder\.layers, decoder\.layers",
        ),
        (lambda: [Residual()] * 2, ValueError, "layer 2 is the same module"),
    ],
)
def test_what_is_refused_at_the_call(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    model = make()
    refused(error, message, drop_layers, model, SCHEDULE)
    if isinstance(model, nn.Module):
        assert not any("forward" in layer.__dict__ for layer in model.modules())


def test_arguments() -> None:
    model = make_stack()
    refused(TypeError, "ProgressiveLayerDrop", drop_layers, model, 0.5)
    refused(ValueError, "seed", drop_layers, model, SCHEDULE, seed=2**63)
    drop_layers(model, SCHEDULE)
    refused(TypeError, "got NoneType as its first argument", model.layers[0], mask=None)


class Of(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.forward = function


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + self.branch(hidden))


@pytest.mark.parametrize("step", [0, 1000])
@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (PostNorm, ValueError, "normalises what it returns"),
        (lambda: nn.Linear(WIDTH, WIDTH), ValueError, "is not residual"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), ValueError, "normalises|is not residual"),
        (lambda: Of(lambda hidden: torch.cat([hidden, hidden], -1)), ValueError, r"shape \(5, 12\) into \(5, 24\)"),
        (lambda: Of(lambda hidden: (hidden * 1.5, hidden)), ValueError, r"more than hidden states \(Tensor\)"),
        (lambda: Of(lambda hidden: {"hidden": hidden}), TypeError, "returned dict"),
    ],
)
def test_layers_that_show_it_when_run(make, error, match, step) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Residual(), make()])
    schedule = ProgressiveLayerDrop(0.0, 1.0)
    schedule.update_state(step)
    drop_layers(layers, schedule)
    hidden = torch.randn(5, WIDTH)
    refused(error, match, layers[1], layers[0](hidden))
    assert all(module.training for module in layers.modules())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_residual_layer_that_outgrows_its_input_is_accepted(sign: float) -> None:
    layer = Of(lambda hidden: hidden + sign * 0.3 * hidden.abs() * hidden)  # not homogeneous
    drop_layers([layer], SCHEDULE)
    layer(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)))
