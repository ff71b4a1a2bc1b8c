"""The configuration's `sparse_attention` and `progressive_layer_drop`: what they do to a model in training."""

import math

import pytest
import torch
from torch import nn

from tests.engine.tiny import at_stages, equal, make_engine, settings, weights
from tests.launching import on_threads
from thinwire import initialize
from thinwire.comm import threads
from thinwire.engine import ConfigError
from thinwire.inference import convert

SPARSE = {"mode": "bigbird", "block": 16, "num_random_blocks": 0}
DROP = {"enabled": True, "theta": 0.5, "gamma": 1.0}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(8) for _ in range(4))
        self.ran: list[int] = []
        for number, layer in enumerate(self.layers):
            layer.linear.register_forward_hook(lambda *_, number=number: self.ran.append(number))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def bert(pre_ln: bool = False, inner: int = 32):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": inner}
    torch.manual_seed(0)
    if pre_ln:
        config = transformers.RobertaPreLayerNormConfig(vocab_size=40, max_position_embeddings=200, **sizes)
        return transformers.RobertaPreLayerNormForMaskedLM(config)
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=160, **sizes)
    return transformers.BertForMaskedLM(config)


def read(engine, steps, rank=0):
    """Losses of a BERT's steps."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, 40, (6, 96), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def losses(engine, steps):
    """Of a stack's steps."""
    found = []
    for step in steps:
        loss = engine(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_sparse_attention_is_plugged_in() -> None:
    dense, sparse = (make_engine(None, settings(**one), model=bert()) for one in ({}, {"sparse_attention": SPARSE}))
    assert "thinwire" in sparse.module.config._attn_implementation
    found = read(sparse, range(2))
    assert found != read(dense, range(2))
    assert all(map(math.isfinite, found))


def test_sparse_attention_needs_a_model_it_knows() -> None:
    with pytest.raises(TypeError, match="plugs into Hugging Face models, and Stack is none"):
        initialize(model=Stack(), config=settings(sparse_attention=SPARSE))


def test_fast_encoder() -> None:
    """Sharded training without padding keeps to the losses of the plain model."""
    found = []
    for config in ({}, {"fast_encoder": True}):
        engine = make_engine(None, settings(1, **config), model=bert().eval())
        mask = torch.arange(96) < torch.tensor([96, 3, 50, 20, 1, 77])[:, None]
        for step in range(3):
            tokens = torch.randint(0, 40, (6, 96), generator=torch.Generator().manual_seed(step))
            loss = engine(tokens, mask.long(), labels=tokens.where(mask, -100)).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.close()
    assert found[:3] == pytest.approx(found[3:], rel=1e-5)
    with pytest.raises(TypeError, match="Stack has no encoder that is known here"):
        initialize(model=Stack(), config=settings(fast_encoder=True))


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("stage", [1, 3])
def test_training_with_the_rounding_of_quantised_layers(stage) -> None:
    """The layers round while the engine is there, whatever shards them; `convert` answers as they did."""
    engine = make_engine(None, settings(stage, quantized_training="int8-dynamic"), model=bert(inner=128))
    found = read(engine, range(2))
    tokens = torch.randint(0, 40, (2, 64))
    expected = engine.module.eval()(tokens).logits.detach()
    if stage < 3:
        torch.testing.assert_close(convert(engine.module)(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    engine.close()
    assert found != read(make_engine(None, settings(stage), model=bert(inner=128)), range(2))
    with pytest.raises(ValueError, match="Stack has no linear layer that int4 takes"):
        initialize(model=Stack(), config=settings(quantized_training="int4"))


def test_layers_are_dropped_alike_and_leave_their_weights_alone() -> None:
    def body(comm, stage):
        config = settings(stage, progressive_layer_drop=DROP, gradient_accumulation_steps=2)
        engine = make_engine(comm, config, model=Stack())
        engine.backward(engine(torch.ones(6, 8)))
        engine.step()
        runs = []
        for micro in range(24):
            engine.module.ran.clear()
            inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * micro + comm.rank))
            engine.backward(engine(inputs))
            engine.step()
            runs.append(tuple(engine.module.ran))
        engine.eval()
        engine.module.ran.clear()
        engine(torch.ones(6, 8))
        assert engine.module.ran == [0, 1, 2, 3]
        return runs, weights(engine.module)

    for (runs, expected), *others in at_stages(body, ranks=3):
        assert len(set(runs[4:])) > 3  # once theta has fallen, steps differ
        assert all(other == runs and equal(found, expected) for other, found in others)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_dropped_layers_are_not_sent(comm, stage) -> None:
    sent = []
    for theta in (1.0, 0.2):
        config = settings(
            stage,
            progressive_layer_drop={"enabled": True, "theta": theta, "gamma": 5.0},
            zero_optimization={"stage": stage, "reduce_bucket_size": 64},
        )
        engine = make_engine(comm, config, model=Stack())
        losses(engine, range(12))
        sent.append(engine.optimizer.bytes_sent)
    everything, less = sent
    assert less < 0.9 * everything


@pytest.mark.parametrize("recomputed", [[], ["Residual"]])
def test_a_resumed_run_drops_what_the_other_would_have(tmp_path, recomputed) -> None:
    def make():
        config = settings(1, progressive_layer_drop=DROP, activation_checkpointing={"modules": recomputed})
        return make_engine(None, config, model=Stack())

    engine = make()
    losses(engine, range(7))
    engine.save_checkpoint(tmp_path)
    expected = losses(engine, range(7, 20))
    engine.load_checkpoint(tmp_path)
    assert losses(engine, range(7, 20)) == expected
    resumed = make()
    resumed.load_checkpoint(tmp_path)
    assert losses(resumed, range(7, 20)) == expected
    resumed.close()
    assert all("forward" not in layer.__dict__ for layer in resumed._module.layers)


class Named(nn.Linear):
    def forward(self, x, progressive_layer_drop=False, pld_theta=1.0):
        self.told = (progressive_layer_drop, pld_theta)
        return super().forward(x).mean()


class LookedUp(nn.Linear):
    """As the model of DeepSpeed's own tests."""

    def forward(self, x, **kwargs):
        self.told = (kwargs.get("progressive_layer_drop", False), kwargs.get("pld_theta", 1.0))
        return super().forward(x).mean()


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.ModuleList([inner])

    def forward(self, *inputs, **kwargs):
        return self.inner[0](*inputs, **kwargs)


@pytest.mark.parametrize(
    ("make", "find"),
    [
        (lambda: Named(4, 4), lambda model: model),
        (lambda: LookedUp(4, 4), lambda model: model),
        (lambda: Wrapped(Named(4, 4)), lambda model: model.inner[0]),
        (lambda: Wrapped(LookedUp(4, 4)), lambda model: model.inner[0]),
        (lambda: Wrapped(Wrapped(Named(4, 4))), lambda model: model.inner[0].inner[0]),
    ],
    ids=["named", "looked up", "wrapped", "wrapped and looked up", "wrapped twice"],
)
def test_a_model_that_drops_layers_by_itself_is_told(make, find) -> None:
    engine = make_engine(None, settings(progressive_layer_drop=DROP), model=make())
    for step in range(3):
        engine.backward(engine(torch.ones(6, 4)))
        assert find(engine.module).told == (True, 0.5 * math.exp(-step) + 0.5)
        engine.step()
    engine.eval()
    engine(torch.ones(6, 4))
    assert find(engine.module).told == (False, 1.0)


def test_any_keyword_arguments_are_not_the_state() -> None:
    class Others(Stack):
        def forward(self, x, **kwargs):
            assert not kwargs
            return super().forward(x)

    engine = initialize(model=Others(), config=settings(progressive_layer_drop=DROP))[0]
    engine.backward(engine(torch.ones(6, 8)))
    assert "forward" in engine.module.layers[0].__dict__
    engine.close()


def test_both_together_on_bert() -> None:
    config = settings(1, sparse_attention=SPARSE, progressive_layer_drop=DROP)

    def body(comm):
        engine = make_engine(comm, config, model=bert(pre_ln=True))
        read(engine, range(4), comm.rank)
        return weights(engine.module)

    assert equal(*threads.run(body, 2))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sparse_attention": {"mode": "bigbird", "num_global_block": 1}}, 'Did you mean "num_global_blocks"'),
        ({"progressive_layer_drop": {"enabled": True, "theta": 1.5}}, "progressive_layer_drop.theta"),
        ({"progressive_layer_drop": {"enabled": True, "gamma": -1.0}}, 'gamma" must be a number, at least 0'),
        ({"progressive_layer_drop": {"enabled": True, "gamma": "auto"}}, "total_num_steps"),
        ({"progressive_layer_drop": DROP, "zero_optimization": {"stage": 3}}, "does not go with"),
    ],
)
def test_bad_input(section, message) -> None:
    with pytest.raises(ConfigError, match=message):
        initialize(model=Stack(), config=settings() | section)
