"""Recomputed activations: the same bits with dropout, less memory, the same parameter names, copies and undoing."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.refusing import refused
from thinwire.engine.activation_checkpointing import ActivationCheckpoints, checkpoint_activations

WIDTH = 7


class Block(nn.Module):
    """A layer with dropout, inputs by keyword, and something that is no tensor."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 5 * width)
        self.narrow = nn.Linear(5 * width, width)
        self.runs = 0

    def forward(self, hidden: Tensor, scale: Tensor, *, mask: Tensor | None = None, power: int = 1) -> Tensor:
        self.runs += 1
        inside = nn.functional.dropout(torch.tanh(self.wide(hidden * scale)), 0.3, self.training) ** power
        out = hidden + self.narrow(inside)
        return out if mask is None else out * mask


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(2)])
        self.named = nn.ModuleDict()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        scale = torch.full((1,), 1.5)
        for block in self.blocks:
            hidden = block(scale=scale, hidden=hidden, mask=(inputs > -1).float(), power=2)
        return torch.stack([head(hidden) for head in self.heads]).square().mean()


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Loss, gradients, and what the generator gives next."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of()
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return loss.detach(), grads, torch.rand(3)


def assert_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert torch.equal(one[0], other[0])
    assert len(one[1]) == len(other[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert torch.equal(one[2], other[2])


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Counts the distinct memory that autograd saves inside."""
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    total = [0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total[0] = sum(storages.values())


@pytest.mark.parametrize("cpu_checkpointing", [False, True])
def test_the_same_bits_with_dropout(cpu_checkpointing: bool) -> None:
    model, inputs = Model(), torch.randn(5, WIDTH)
    plain = gradients(model, lambda: model(inputs), seed=3)
    keys = list(model.state_dict())
    checkpoints = checkpoint_activations(model, ["Block"], cpu_checkpointing=cpu_checkpointing)
    assert checkpoints.names == ("blocks.0", "blocks.1", "blocks.2")
    for _ in range(2):
        assert_equal(gradients(model, lambda: model(inputs), seed=3), plain)
    assert list(model.state_dict()) == keys
    assert [block.runs for block in model.blocks] == [1 + 2 * 2] * 3


def test_inputs_are_kept_through_save_on_cpu(monkeypatch) -> None:
    """What autograd keeps of a module under cpu_checkpointing is the packed input, and nothing else."""
    packed: list[Tensor] = []

    class Spy(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert not pin_memory

            def pack(tensor: Tensor) -> Tensor:
                packed.append(tensor)
                return tensor.double()

            super().__init__(pack, lambda tensor: tensor.float())

    monkeypatch.setattr("thinwire.engine.activation_checkpointing.save_on_cpu", Spy)
    model, inputs = Model(), torch.randn(5, WIDTH)
    plain = gradients(model, lambda: model(inputs), seed=5)
    checkpoint_activations(model, ["Block"], cpu_checkpointing=True)
    assert_equal(gradients(model, lambda: model(inputs), seed=5), plain)
    kept = [tensor.shape for tensor in packed if tensor.numel()]  # torch 2.11 keeps empty ones beside them
    assert kept == [inputs.shape] * 3


def test_undoing() -> None:
    model, inputs = Model(), torch.randn(2, WIDTH)
    plain = gradients(model, lambda: model(inputs), seed=1)
    before = [dict(block.__dict__) for block in model.blocks]
    checkpoints = checkpoint_activations(model, ["Block"])
    with pytest.raises(ValueError, match=r"'blocks\.0' recomputes its activations already: call restore"):
        checkpoint_activations(model, ["Block"])
    checkpoints.restore()
    checkpoints.restore()
    assert [block.__dict__.keys() for block in model.blocks] == [names.keys() for names in before]
    runs = [block.runs for block in model.blocks]
    assert_equal(gradients(model, lambda: model(inputs), seed=1), plain)
    assert [block.runs for block in model.blocks] == [count + 1 for count in runs]


def test_a_forward_that_somebody_set_is_kept() -> None:
    model = Model()
    own = model.blocks[1].forward
    model.blocks[1].forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    patched = model.blocks[1].forward
    inputs = torch.randn(2, WIDTH)
    plain = gradients(model, lambda: model(inputs), seed=1)
    checkpoints = checkpoint_activations(model, ["Block"])
    assert_equal(gradients(model, lambda: model(inputs), seed=1), plain)
    checkpoints.restore()
    assert model.blocks[1].forward is patched


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_compute_with_their_own_parameters(how: str) -> None:
    model, inputs = Model(), torch.randn(2, WIDTH)
    checkpoint_activations(model, ["Block"])
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2.0)
    reference = Model()
    reference.load_state_dict(twin.state_dict())
    expected = gradients(reference, lambda: reference(inputs), seed=1)
    assert_equal(gradients(twin, lambda: twin(inputs), seed=1), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(block.runs == 2 for block in twin.blocks)


def test_without_gradients_nothing_runs_twice() -> None:
    model = Model()
    checkpoint_activations(model, ["Block"])
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    assert [block.runs for block in model.blocks] == [1] * 3


def test_frozen_first_layers_and_accumulation() -> None:
    """The first block's input needs no gradient; two backwards add up."""
    model, inputs = Model(), torch.randn(4, WIDTH)
    model.first.requires_grad_(False)
    model.blocks[2].requires_grad_(False)

    def twice() -> Tensor:
        model(inputs).backward()
        return model(inputs + 1)

    plain = gradients(model, twice, seed=2)
    checkpoint_activations(model, ["Block"], cpu_checkpointing=True)
    assert_equal(gradients(model, twice, seed=2), plain)


def choose(model: nn.Module, *modules: str) -> tuple[str, ...]:
    checkpoints: ActivationCheckpoints = checkpoint_activations(model, modules)
    checkpoints.restore()
    return checkpoints.names


def test_modules_are_chosen_by_class_or_name() -> None:
    model = Model()
    assert choose(model, "Block") == ("blocks.0", "blocks.1", "blocks.2")
    assert choose(model, "blocks.2", "first") == ("blocks.2", "first")
    assert choose(model, "heads", "blocks.0", "heads.1") == ("heads.0", "heads.1", "blocks.0")
    assert choose(model, "Model") == ("",)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["Blok"], "'Blok' is neither a class nor the name of a module in Model; did you mean 'Block'"),
        (["blocks.7"], r"did you mean 'blocks\.\d'"),
        ([""], "neither a class nor the name"),
        ([], "no modules were named"),
        (["named"], "ModuleDict, which has no forward"),
        (["blocks", "blocks.1.wide"], r"'blocks\.1\.wide' lies inside 'blocks\.1'"),
        (["Model", "Block"], r"'blocks\.0' lies inside 'the model'"),
    ],
)
def test_bad_choices_name_what_is_near(modules: list[str], message: str) -> None:
    model = Model()
    refused(ValueError, message, checkpoint_activations, model, modules)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_hugging_face_bert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40
    )
    model = transformers.BertForMaskedLM(config).train()
    tokens = torch.randint(50, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0

    def loss() -> Tensor:
        return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss

    plain = gradients(model, loss, seed=8)
    with saved_bytes() as before:
        loss()
    keys = list(model.state_dict())
    checkpoints = checkpoint_activations(model, ["BertLayer"])
    assert checkpoints.names == tuple(f"bert.encoder.layer.{number}" for number in range(3))
    assert list(model.state_dict()) == keys
    assert_equal(gradients(model, loss, seed=8), plain)
    with saved_bytes() as after:
        loss()
    assert after[0] < before[0] / 2
    checkpoints.restore()
    model.bert.encoder.layer[1].gradient_checkpointing = True
    refused(ValueError, "by its own gradient checkpointing", checkpoint_activations, model, ["BertLayer"])


def test_a_cache_of_keys_and_values_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(30, (2, 5))
    checkpoint_activations(model, ["LlamaDecoderLayer"])
    refused(ValueError, "use_cache = False", model, input_ids=tokens, labels=tokens)
    model.config.use_cache = False
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
