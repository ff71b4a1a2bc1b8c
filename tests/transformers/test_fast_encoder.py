"""Encoders without padding give what the plain ones give: losses, gradients and states, in float64."""

import copy
import inspect
import pickle

import pytest
import torch

from tests.refusing import refused
from thinwire.sparse_attn import LocalSlidingWindow, sparsify
from thinwire.transformers import accelerate, undo

transformers = pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 80,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SLIDING = {"local_attention": 8, "global_attn_every_n_layers": 2}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_CONFIGS = {
    "Bert": {**_NO_DROPOUT, "pad_token_id": 0},
    "Roberta": {**_NO_DROPOUT, "pad_token_id": 1},
    "XLMRoberta": {**_NO_DROPOUT, "pad_token_id": 1},
    "RobertaPreLayerNorm": {**_NO_DROPOUT, "pad_token_id": 1},
    "ModernBert": {**_SLIDING, **_TOKENS, "classifier_pooling": "mean"},
}


def build(family, head="ForMaskedLM", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SIZES, **_CONFIGS[family], **more)
    return getattr(transformers, f"{family}{head}")(config).double()


def batch(model, left=False, lengths=(40, 1, 17, 0, 33)):
    """Documents of these lengths, with labels for some of their tokens."""
    size, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left else mask
    ids = torch.where(mask, torch.randint(5, 64, (size, longest)), torch.tensor(model.config.pad_token_id))
    labelled = mask & (torch.rand(size, longest) < 0.3)
    return {"input_ids": ids, "attention_mask": mask.long()}, torch.where(labelled, ids, torch.tensor(-100))


def gradients(model, loss):
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("family", _CONFIGS)
def test_masked_language_models(family, left) -> None:
    plain = build(family)
    fast = pickle.loads(pickle.dumps(copy.deepcopy(accelerate(copy.deepcopy(plain)))))
    inputs, labels = batch(plain, left)
    losses = [model.train()(**inputs, labels=labels).loss for model in (plain, fast)]
    torch.testing.assert_close(losses[1].float(), losses[0].float(), rtol=1e-6, atol=0.0)
    close(*(gradients(model, loss) for model, loss in zip((plain, fast), losses, strict=True)))
    found = [model.eval()(**inputs, labels=labels, output_hidden_states=True) for model in (plain, fast)]
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[1].logits[kept], found[0].logits[kept])
    for states in zip(*(one.hidden_states for one in found), strict=True):
        torch.testing.assert_close(states[1][kept], states[0][kept])


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_bf16_within_its_rounding(family) -> None:
    """No further from the exact loss and gradients than twice what the plain model in bf16 is, and one rounding."""
    exact, eps = build(family), torch.finfo(torch.bfloat16).eps
    plain = copy.deepcopy(exact).bfloat16()
    fast = accelerate(copy.deepcopy(plain))
    inputs, labels = batch(exact)
    losses = [model.train()(**inputs, labels=labels).loss for model in (exact, plain, fast)]
    expected, one, other = (loss.double() for loss in losses)
    assert (other - expected).abs() <= 2 * (one - expected).abs() + eps * expected.abs()
    found = [gradients(model, loss) for model, loss in zip((exact, plain, fast), losses, strict=True)]
    for name, value in found[0].items():
        off = [float((one[name].double() - value).norm()) for one in found[1:]]
        assert off[1] <= 2 * off[0] + eps * float(value.norm()), name


@pytest.mark.parametrize(("family", "head"), [("Bert", "Model"), ("ModernBert", "ForSequenceClassification")])
def test_other_heads(family, head) -> None:
    """Pooled from the first token or by mean: from each document, not from the row of them all."""
    plain = build(family, head)
    fast = accelerate(copy.deepcopy(plain))
    inputs, _ = batch(plain, lengths=(40, 1, 17, 33))
    one, other = (model.eval()(**inputs)[-1] for model in (plain, fast))
    torch.testing.assert_close(other, one)
    as_tuple = fast(inputs["input_ids"], inputs["attention_mask"], return_dict=False)
    torch.testing.assert_close(as_tuple[-1], one)
    close(*(gradients(model, result.square().sum()) for model, result in ((plain, one), (fast, other))))


def test_embeddings_given_in_place_of_tokens() -> None:
    plain = build("Roberta")
    fast = accelerate(copy.deepcopy(plain))
    inputs, labels = batch(plain)
    embeds = plain.get_input_embeddings()(inputs["input_ids"]).detach()
    types = torch.zeros_like(inputs["input_ids"])
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], "token_type_ids": types}
    one, other = (model.train()(**given, labels=labels).loss for model in (plain, fast))
    torch.testing.assert_close(other, one, rtol=1e-6, atol=0.0)


def test_sparse_attention_stays_within_documents() -> None:
    plain = sparsify(build("Bert").float(), LocalSlidingWindow(num_heads=4, block=16, num_sliding_window_blocks=3))
    fast = accelerate(copy.deepcopy(plain))
    inputs, labels = batch(plain, lengths=(80, 40, 9))
    one, other = (model.train()(**inputs, labels=labels).loss for model in (plain, fast))
    torch.testing.assert_close(other, one, rtol=1e-5, atol=0.0)
    found = gradients(fast, other)
    for name, gradient in gradients(plain, one).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_recomputed_activations() -> None:
    plain = build("Bert")
    fast = accelerate(copy.deepcopy(plain))
    fast.gradient_checkpointing_enable()
    inputs, labels = batch(plain)
    one, other = (model.train()(**inputs, labels=labels).loss for model in (plain, fast))
    close(gradients(plain, one), gradients(fast, other))


def test_a_loss_over_the_items_of_a_whole_step() -> None:
    plain = build("ModernBert")
    fast = accelerate(copy.deepcopy(plain))
    inputs, labels = batch(plain)
    one, other = (model.train()(**inputs, labels=labels, num_items_in_batch=70).loss for model in (plain, fast))
    torch.testing.assert_close(other.float(), one, rtol=1e-6, atol=0.0)


def test_what_needs_nothing_takes_the_plain_path() -> None:
    """No mask, one without padding, or one of queries and keys: to the bit."""
    plain = build("Bert").eval()
    fast = accelerate(copy.deepcopy(plain))
    ids = torch.randint(5, 64, (3, 20))
    every = torch.ones(3, 20, dtype=torch.long)
    for mask in (None, every, torch.ones(3, 1, 20, 20, dtype=torch.bool).tril()):
        assert torch.equal(plain(ids, attention_mask=mask).logits, fast(ids, attention_mask=mask).logits)


def test_undo_gives_the_plain_model_back() -> None:
    plain = build("Bert").eval()
    fast = accelerate(accelerate(copy.deepcopy(plain)))
    assert inspect.signature(fast.forward) == inspect.signature(plain.forward)  # which trainers choose columns by
    assert fast.state_dict().keys() == plain.state_dict().keys()
    inputs, _ = batch(plain)
    undo(undo(fast))
    assert fast.config.to_json_string() == plain.config.to_json_string()
    assert torch.equal(fast(**inputs).logits, plain(**inputs).logits)


def test_it_saves_as_hugging_face_saves(tmp_path) -> None:
    fast = accelerate(build("Bert"))
    fast.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    close(dict(loaded.named_parameters()), dict(fast.named_parameters()))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="GPT2LMHeadModel has no encoder that is known here, of Bert, Roberta"):
        accelerate(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2)))
    refused(TypeError, "Linear has no encoder", accelerate, torch.nn.Linear(2, 2))
    refused(ValueError, "is_decoder=True", accelerate, build("Bert", is_decoder=True))
    fast = accelerate(build("Bert"))
    refused(ValueError, "exactly one of input_ids or inputs_embeds", fast, attention_mask=torch.tensor([[1, 0]]))
