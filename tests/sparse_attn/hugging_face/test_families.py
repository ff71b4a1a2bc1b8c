"""The families of models that are promised: served with their own numbers, or refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.sparse_attn.hugging_face.test_sparsify import SIZES, batch, logits, make
from thinwire.sparse_attn import BigBird, Dense, LocalSlidingWindow, sparsify

transformers = pytest.importorskip("transformers")

FAMILIES = {
    "ModernBert": ("ForMaskedLM", {"local_attention": 32, "pad_token_id": 0}),
    "Gemma": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "Gemma3": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 32}),
    "Qwen2": ("ForCausalLM", {"num_key_value_heads": 2}),
    "Qwen3": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "Mistral": ("ForCausalLM", {"num_key_value_heads": 2, "sliding_window": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served(family: str) -> None:
    head, options = FAMILIES[family]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, family + head)(config(**SIZES, **options)).eval()
    inputs = batch()
    own = logits(model, inputs)
    direction = "bidirectional" if head == "ForMaskedLM" else "unidirectional"
    sparsify(model, Dense(4, attention=direction))
    torch.testing.assert_close(logits(model, inputs), own, atol=1e-4, rtol=0)
    sparsify(model, BigBird(4, num_sliding_window_blocks=1, attention=direction))
    assert torch.isfinite(logits(model, inputs)).all()


def test_a_vision_transformer_is_served() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=64, patch_size=8
    )
    model, pixels = transformers.ViTForImageClassification(config).eval(), torch.randn(2, 3, 64, 64)
    own = model(pixels).logits
    torch.testing.assert_close(sparsify(model, Dense(4))(pixels).logits, own, atol=1e-4, rtol=0)
    narrow = sparsify(model, LocalSlidingWindow(4, 16, num_sliding_window_blocks=1, attention="bidirectional"))
    assert not torch.equal(narrow(pixels).logits, own)


def test_what_needs_more_than_blocks_is_refused_by_name() -> None:
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="Gemma2Attention passes softcap"):
        logits(sparsify(transformers.Gemma2ForCausalLM(config).eval(), Dense(4)), batch())
    with pytest.raises(TypeError, match="DebertaV2ForMaskedLM cannot be sparsified"):
        sparsify(transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**SIZES)), Dense(4))


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("kind", ["Bert", "GPT2"])
def test_short_inputs_are_attended_densely(kind: str, length: int) -> None:
    model = make(kind)
    ids = torch.randint(5, 50, (2, length))
    own = model(input_ids=ids).logits
    direction = "bidirectional" if kind == "Bert" else "unidirectional"
    sparsify(model, BigBird(4, 16, num_sliding_window_blocks=5, attention=direction))
    torch.testing.assert_close(model(input_ids=ids).logits, own, atol=1e-4, rtol=0)
