"""torch's encoder and Hugging Face's pre-LN models, with masks; recomputation and compilation."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pairwise import pairwise
from tests.pld.models import Stack, batch, hugging_face, make_stack, settled
from tests.refusing import refused
from thinwire.engine.activation_checkpointing import checkpoint_activations
from thinwire.pld import drop_layers, undrop

PRE_LN = ["gpt2", "llama", "roberta_prelayernorm"]


def tokens(seed: int, length: int = 9) -> Tensor:
    return torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, msg=name)


@pytest.mark.parametrize("name", PRE_LN)
def test_hugging_face_trains_and_is_restored(name: str) -> None:
    model, ids = hugging_face(name).eval(), tokens(0)
    expected = model(ids).logits
    model.train()
    handle = drop_layers(model, settled(0.3), seed=1)
    assert len(handle.layers) == 3
    dropped = set()
    for micro in range(8):
        model.zero_grad()
        output = model(tokens(micro), attention_mask=torch.ones(2, 9, dtype=torch.long), labels=tokens(micro))
        assert bool(output.loss.isfinite())
        output.loss.backward()
        dropped |= {layer for layer in handle.layers if all(one.grad is None for one in layer.parameters())}
    assert dropped
    assert all(rate <= 1 for rate in handle.keep_rates)
    model.eval()
    assert torch.equal(model(ids).logits, expected)
    undrop(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_torch_encoder(masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, norm_first=True, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = masked
    drop_layers(encoder, settled(0.3))
    hidden = torch.randn(3, 6, 16, requires_grad=True)
    for _ in range(6):
        encoder(hidden, src_key_padding_mask=padding).sum().backward()
    encoder.eval()
    expected = encoder(hidden, src_key_padding_mask=padding)
    undrop(encoder)
    assert torch.equal(encoder(hidden, src_key_padding_mask=padding), expected)


class Recomputed(nn.Module):
    """A stack whose layers run again in backward, each, or all in one."""

    def __init__(self, stack: Stack, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.stack, self.reentrant, self.whole = stack, reentrant, whole

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stack.embed(inputs)
        if self.whole:
            hidden = checkpoint(self._all, hidden, use_reentrant=self.reentrant)
        else:
            for layer in self.stack.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return self.stack.head(hidden)

    def _all(self, hidden: Tensor) -> Tensor:
        for layer in self.stack.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(("whole", "reentrant", "forwards_first"), pairwise(*[[False, True]] * 3))
def test_recomputation_repeats_the_first_run(whole: bool, reentrant: bool, forwards_first: bool) -> None:
    plain, twin = make_stack(), make_stack()
    recomputed = Recomputed(twin, reentrant, whole)
    mine, theirs = (drop_layers(each, settled(0.3), seed=9) for each in (plain, twin))
    for start in range(0, 12, 3):
        for model, each in ((plain, plain), (recomputed, twin)):
            each.zero_grad()
            losses = []
            for micro in range(start, start + 3):
                losses.append(model(batch(micro)).square().sum())
                if not forwards_first:
                    losses.pop().backward()
            for loss in losses:  # of several forwards, the first one's backward comes first
                loss.backward()
        assert_same_gradients(plain, twin)
    assert mine.keep_rates == theirs.keep_rates


@pytest.mark.parametrize("checkpoints_first", [False, True])
@pytest.mark.parametrize("to_cpu", [False, True])
def test_the_engines_activation_checkpointing(checkpoints_first: bool, to_cpu: bool) -> None:
    plain, twin = make_stack(), make_stack()
    drop_layers(plain, settled(0.3), seed=9)
    if checkpoints_first:
        checkpoint_activations(twin, ["layers"], cpu_checkpointing=to_cpu)
    drop_layers(twin, settled(0.3), seed=9)
    if not checkpoints_first:
        checkpoint_activations(twin, ["layers"], cpu_checkpointing=to_cpu)
        refused(ValueError, "activation checkpointing", undrop, twin)
    for micro in range(8):
        for each in (plain, twin):
            each.zero_grad()
            each(batch(micro)).square().sum().backward()
        assert_same_gradients(plain, twin)


@pytest.mark.parametrize("compiled_first", [False, True])
@pytest.mark.programs
def test_compiled(compiled_first: bool) -> None:
    """With aot_eager, which does all that eager does and compiles backward as well."""
    torch._dynamo.reset()
    plain, twin = make_stack(layers=3), make_stack(layers=3)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, backend=graphs)
    if compiled_first:
        compiled(batch(0)).sum().backward()
    schedules = [settled(0.3), settled(0.3)]
    for each, schedule in zip((plain, compiled if compiled_first else twin), schedules, strict=True):
        drop_layers(each, schedule, seed=2)
    counts = []
    for step in range(2, 16):
        for schedule in schedules:
            schedule.update_state(step)
        for model, each in ((plain, plain), (compiled, twin)):
            each.zero_grad()
            model(batch(step)).square().sum().backward()
        assert_same_gradients(plain, twin)
        counts.append(graphs.frame_count)
    assert 0 < counts[-1] == counts[7], "gates must not make it compile again"
