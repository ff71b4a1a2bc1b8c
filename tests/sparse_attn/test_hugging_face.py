"""Sparse attention inside Hugging Face models: the same numbers where every block is there, and honest refusals."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.refusing import refused
from tests.sparse_attn.cases import relative_error
from thinwire.deepspeed.ops.sparse_attention import SparseAttentionUtils
from thinwire.sparse_attn import (
    BigBird,
    Dense,
    LocalSlidingWindow,
    densify,
    extend_position_embedding,
    sparsify,
    update_tokenizer_model_max_length,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
}


FAMILIES = {
    "Bert": ("ForMaskedLM", {}),
    "Roberta": ("ForMaskedLM", {}),
    "ModernBert": ("ForMaskedLM", {"local_attention": 32, "pad_token_id": 0}),
    "GPT2": ("LMHeadModel", {}),
    "Llama": ("ForCausalLM", {"num_key_value_heads": 2}),
    "Gemma": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "Gemma3": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 32}),
    "Qwen2": ("ForCausalLM", {"num_key_value_heads": 2}),
    "Qwen3": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "Mistral": ("ForCausalLM", {"num_key_value_heads": 2, "sliding_window": 32}),
}
NARROW = LocalSlidingWindow(4, 16, num_sliding_window_blocks=1, attention="bidirectional")


def make(kind: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    head, own = FAMILIES[kind]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    return getattr(transformers, kind + head)(config(**{**SIZES, **own, **options})).eval()


def direction_of(kind: str) -> str:
    return "bidirectional" if FAMILIES[kind][0] == "ForMaskedLM" else "unidirectional"


def check_close(found: Tensor, own: Tensor) -> None:
    torch.testing.assert_close(found, own, atol=1e-4, rtol=0)


def batch(length: int = 70) -> dict[str, Tensor]:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length - 13 :] = 0
    return {"input_ids": torch.randint(5, 50, (2, length)), "attention_mask": mask}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Of real tokens alone: what padding says to itself is nobody's business."""
    out = model(**inputs, **({"use_cache": False} if hasattr(model.config, "use_cache") else {})).logits
    return out[inputs["attention_mask"].bool()]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_block_is_the_models_own_attention(kind: str) -> None:
    model, inputs = make(kind), batch()
    own, unpadded = logits(model, inputs), model(input_ids=inputs["input_ids"]).logits
    sparsify(model, Dense(4, attention=direction_of(kind)))
    check_close(logits(model, inputs), own)
    check_close(model(input_ids=inputs["input_ids"]).logits, unpadded)
    sparsify(model, BigBird(4, num_sliding_window_blocks=1, attention=direction_of(kind)))
    assert torch.isfinite(logits(model, inputs)).all()
    assert torch.equal(logits(densify(model), inputs), own)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("kind", ["Bert", "GPT2"])
def test_short_inputs_are_attended_densely(kind: str, length: int) -> None:
    model, ids = make(kind), torch.randint(5, 50, (2, length))
    own = model(input_ids=ids).logits
    sparsify(model, BigBird(4, 16, num_sliding_window_blocks=5, attention=direction_of(kind)))
    check_close(model(input_ids=ids).logits, own)


def test_a_vision_transformer_is_served() -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(intermediate_size=48, image_size=64, patch_size=8, **sizes)
    model, pixels = transformers.ViTForImageClassification(config).eval(), torch.randn(2, 3, 64, 64)
    own = model(pixels).logits
    check_close(sparsify(model, Dense(4))(pixels).logits, own)
    assert not torch.equal(sparsify(model, NARROW)(pixels).logits, own)


def test_a_causal_model_stays_causal_under_a_bidirectional_layout() -> None:
    model, inputs = make("GPT2"), batch()
    own = logits(model, inputs)
    check_close(logits(sparsify(model, Dense(1)), inputs), own)


def test_training_gives_the_same_gradients_and_drops_attention() -> None:
    dense = make("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    sparse = sparsify(copy.deepcopy(dense), Dense(4))
    inputs = batch()
    for model in (dense, sparse):
        logits(model, inputs).square().mean().backward()
    for one, other in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert other.grad is None or relative_error(one.grad, other.grad) < 1e-3 or other.grad.abs().max() < 1e-7

    dropping = sparsify(make("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5).train(), Dense(4))
    assert not torch.equal(logits(dropping, inputs), logits(dropping, inputs))
    dropping.eval()
    assert torch.equal(logits(dropping, inputs), logits(dropping, inputs))


def test_two_models_of_one_configuration_keep_their_own_attention() -> None:
    config = transformers.BertConfig(**SIZES)
    wide, narrow, dense = (transformers.BertForMaskedLM(config).eval() for _ in range(3))
    for model in (narrow, dense):
        model.load_state_dict(wide.state_dict())
    inputs = batch()
    own = logits(dense, inputs)
    sparsify(wide, Dense(4))
    sparsify(narrow, NARROW)
    check_close(logits(wide, inputs), own)
    assert (logits(narrow, inputs) - own).abs().max() > 1e-3
    assert torch.equal(logits(dense, inputs), own)
    assert "thinwire" not in str(dense.config.to_dict())
    assert "thinwire" not in str(densify(wide).config.to_dict())


def test_sparsify_twice_then_densify_twice() -> None:
    model, inputs = make("Roberta"), batch()
    own, names = logits(model, inputs), list(model.state_dict())
    sparsify(sparsify(model, BigBird(4)), Dense(4))
    check_close(logits(model, inputs), own)
    clone = copy.deepcopy(model)
    for one in (model, clone):
        assert torch.equal(logits(densify(densify(one)), inputs), own)
        assert list(one.state_dict()) == names


def test_a_part_and_the_whole() -> None:
    model, inputs = make("Bert"), batch()
    own = logits(model, inputs)
    narrow = LocalSlidingWindow(4, 16, num_sliding_window_blocks=1)
    sparse = logits(sparsify(model.bert, narrow) and model, inputs)
    assert (sparse - own).abs().max() > 1e-3
    assert torch.equal(logits(densify(model), inputs), own)
    for first, second in ((model, model.bert), (model.bert, model)):
        sparsify(first, Dense(4))
        sparsify(second, narrow)
        assert torch.equal(logits(model, inputs), sparse)
        densify(second)
        densify(first)
        assert torch.equal(logits(model, inputs), own)
    model.set_attn_implementation("sdpa")
    sparsify(model, Dense(4)).set_attn_implementation("sdpa")
    assert torch.equal(logits(sparsify(model, narrow), inputs), sparse)


def another(kind: str, head: str, **options: object) -> nn.Module:
    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**SIZES, **options))


def test_refusals() -> None:
    refused(ValueError, "3 heads, expected 4", sparsify, make("Bert"), Dense(3))
    refused(ValueError, "only grows", sparsify, make("Bert"), Dense(4), max_positions=5)
    refused(TypeError, "no config", sparsify, nn.Linear(2, 2), Dense(1))
    refused(TypeError, "cross-attention", sparsify, make("GPT2", add_cross_attention=True), Dense(4))
    refused(TypeError, "position_embeddings", sparsify, make("Llama"), Dense(4), max_positions=500)
    deberta = another("DebertaV2", "ForMaskedLM")
    refused(TypeError, "DebertaV2ForMaskedLM cannot be sparsified", sparsify, deberta, Dense(4))
    for kind in ("Bert", "GPT2"):
        sparse = sparsify(make(kind), Dense(4))
        refused(ValueError, "never forms the attention probabilities", sparse, **batch(), output_attentions=True)
    capped = another("Gemma2", "ForCausalLM", **FAMILIES["Gemma"][1]).eval()
    refused(ValueError, "Gemma2Attention passes softcap", sparsify(capped, Dense(4)), **batch())


def test_decoding_from_a_cache_is_refused_and_says_what_to_do() -> None:
    model = sparsify(make("GPT2"), Dense(4, attention="unidirectional"))
    with pytest.raises(ValueError, match="densify"):
        model.generate(torch.randint(5, 50, (1, 20)), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert (
        model.generate(torch.randint(5, 50, (1, 20)), max_new_tokens=3, use_cache=False, pad_token_id=0).shape[1] > 20
    )


class BertSelfAttention(nn.Module):
    """A stand-in with the names and signature of transformers 4's class, which is not installed here."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = 4
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states, attention_mask=None, head_mask=None, *_):  # type: ignore[no-untyped-def]
        q, k, v = (
            layer(hidden_states).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return (out.transpose(1, 2).flatten(2),)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.BertConfig(**SIZES)
        self.attn_implementation = "sdpa"
        self.layer = nn.ModuleList([BertSelfAttention(), BertSelfAttention()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = x + layer(x, mask, None, None, None, None, False)[0]
        return x


def test_modules_of_transformers_4_are_swapped_and_swapped_back() -> None:
    model = Encoder().eval()
    x, mask = torch.randn(2, 40, 32), torch.zeros(2, 1, 1, 40)
    mask[1, ..., 30:] = torch.finfo(torch.float32).min
    own, names, modules = model(x, mask), list(model.state_dict()), list(model.layer)
    sparsify(sparsify(model, BigBird(4, num_sliding_window_blocks=1)), Dense(4))
    assert (list(model.state_dict()), model.attn_implementation) == (names, "eager")
    check_close(model(x, mask), own)
    refused(ValueError, "head_mask given", model.layer[0], x, mask, torch.ones(4))
    densify(model)
    assert list(model.layer) == modules
    assert model.attn_implementation == "sdpa"
    assert torch.equal(model(x, mask), own)


# Longer position tables: which rows, which buffers, which numbers

SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(("kind", "unused"), [("Bert", 0), ("Roberta", 2)])
def test_the_table_repeats_and_everything_follows(kind: str, unused: int) -> None:
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=10 + unused, **SMALL)
    model = getattr(transformers, f"{kind}Model")(config).to(torch.bfloat16)
    old = model.embeddings.position_embeddings.weight.detach().clone()
    assert extend_position_embedding(model, 33) is model
    table = model.embeddings.position_embeddings
    rows = 33 + unused
    assert (table.num_embeddings, model.config.max_position_embeddings) == (rows, rows)
    assert (table.weight.dtype, table.weight.requires_grad) == (torch.bfloat16, True)
    assert torch.equal(table.weight[: 10 + unused], old)
    for i in range(33):
        assert torch.equal(table.weight[unused + i], old[unused + i % 10])
    assert torch.equal(model.embeddings.position_ids, torch.arange(rows)[None])
    assert torch.equal(model.embeddings.token_type_ids, torch.zeros(1, rows, dtype=torch.int64))
    assert model(torch.randint(5, 20, (2, 33))).last_hidden_state.isfinite().all()
    weight = table.weight
    assert extend_position_embedding(model, 33).embeddings.position_embeddings.weight is weight


def test_tables_that_cannot_grow() -> None:
    model = transformers.BertModel(transformers.BertConfig(max_position_embeddings=10, **SMALL))
    refused(ValueError, "reads 10 tokens", extend_position_embedding, model, 9)
    refused(TypeError, "rotary", extend_position_embedding, nn.Linear(2, 2), 9)
    refused(TypeError, "tokenizer", update_tokenizer_model_max_length, nn.Linear(2, 2), 9)


def test_the_tokenizer_truncates_later() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4)
    text = " ".join("a" * 20)
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 4
    update_tokenizer_model_max_length(tokenizer, 9)
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 9
    assert tokenizer.init_kwargs["model_max_length"] == 9


# Layers made sparse without the model


def test_layers_as_the_whole_model() -> None:
    def bert() -> nn.Module:
        return make("Bert", max_position_embeddings=64)

    layout = BigBird(4, 16)
    ids = torch.arange(2 * 100).view(2, 100) % 50
    mask = torch.ones_like(ids)
    mask[1, 70:] = 0
    expected = sparsify(bert(), layout, 128)
    model = SparseAttentionUtils.extend_position_embedding(bert(), 128)
    dense = model(ids, attention_mask=mask).logits
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        model.config, model.bert.encoder.layer, layout
    )
    found = model(ids, attention_mask=mask).logits
    assert torch.equal(found, expected(ids, attention_mask=mask).logits)
    assert not torch.equal(found, dense)
    whole = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(bert(), 128, layout)
    assert torch.equal(whole(ids, attention_mask=mask).logits, found)
    assert torch.equal(densify(model)(ids, attention_mask=mask).logits, dense)
