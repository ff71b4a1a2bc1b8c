"""Configurations of well-known models by name, so that they can be planned without a network or transformers.

Only what the shapes depend on, by the keys of Hugging Face's config.json; what is left out has its family's default.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KNOWN", "Configuration"]

Configuration = dict[str, Any]


def _bert(layers: int, width: int, **others: Any) -> Configuration:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": width // 64}
    return {"model_type": "bert", **shape, "intermediate_size": 4 * width, **others}


def _roberta(layers: int, width: int, vocabulary: int) -> Configuration:
    return {
        **_bert(layers, width, vocab_size=vocabulary, max_position_embeddings=514, type_vocab_size=1),
        "model_type": "roberta",
    }


def _gpt2(layers: int, width: int, heads: int) -> Configuration:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads}


def _neox(layers: int, width: int, heads: int, vocabulary: int = 50304) -> Configuration:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {"model_type": "gpt_neox", **shape, "intermediate_size": 4 * width, "vocab_size": vocabulary}


def _llama(
    kind: str, layers: int, width: int, feed_forward: int, heads: int, groups: int, vocabulary: int, **others: Any
) -> Configuration:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        **others,
    }


def _t5(layers: int, width: int, feed_forward: int, heads: int, key: int = 64, **others: Any) -> Configuration:
    shape = {"num_layers": layers, "d_model": width, "d_ff": feed_forward, "num_heads": heads, "d_kv": key}
    return {"model_type": "t5", **shape, **others}


def _vit(layers: int, width: int, heads: int, patch: int, labels: int) -> Configuration:
    shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "patch_size": patch}
    return {"model_type": "vit", **shape, "intermediate_size": 4 * width, "num_labels": labels}


_TIED: Configuration = {"tie_word_embeddings": True}
_GATED: Configuration = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_QWEN3: Configuration = {"head_dim": 128}

KNOWN: dict[str, Configuration] = {
    "bert-tiny": _bert(2, 128),
    "bert-mini": _bert(4, 256),
    "bert-small": _bert(4, 512),
    "bert-base": _bert(12, 768),
    "bert-large": _bert(24, 1024),
    "bert-base-uncased": _bert(12, 768),
    "bert-large-uncased": _bert(24, 1024),
    "bert-base-cased": _bert(12, 768, vocab_size=28996),
    "bert-large-cased": _bert(24, 1024, vocab_size=28996),
    "roberta-base": _roberta(12, 768, 50265),
    "roberta-large": _roberta(24, 1024, 50265),
    "xlm-roberta-base": _roberta(12, 768, 250002),
    "xlm-roberta-large": _roberta(24, 1024, 250002),
    "distilbert-base-uncased": {"model_type": "distilbert"},
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "distilgpt2": _gpt2(6, 768, 12),
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-1.4b": _neox(24, 2048, 16),
    "pythia-2.8b": _neox(32, 2560, 32),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "llama-2-7b": _llama("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _llama("llama", 40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _llama("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": _llama("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": _llama("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-8b": _llama("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _llama("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": _llama("llama", 126, 16384, 53248, 128, 8, 128256),
    "llama-3.2-1b": _llama("llama", 16, 2048, 8192, 32, 8, 128256, **_TIED),
    "llama-3.2-3b": _llama("llama", 28, 3072, 8192, 24, 8, 128256, **_TIED),
    "llama-3.3-70b": _llama("llama", 80, 8192, 28672, 64, 8, 128256),
    "tinyllama-1.1b": _llama("llama", 22, 2048, 5632, 32, 4, 32000),
    "smollm2-135m": _llama("llama", 30, 576, 1536, 9, 3, 49152, **_TIED),
    "smollm2-360m": _llama("llama", 32, 960, 2560, 15, 5, 49152, **_TIED),
    "smollm2-1.7b": _llama("llama", 24, 2048, 8192, 32, 32, 49152, **_TIED),
    "mistral-7b": _llama("mistral", 32, 4096, 14336, 32, 8, 32000),
    "qwen2.5-0.5b": _llama("qwen2", 24, 896, 4864, 14, 2, 151936, **_TIED),
    "qwen2.5-1.5b": _llama("qwen2", 28, 1536, 8960, 12, 2, 151936, **_TIED),
    "qwen2.5-3b": _llama("qwen2", 36, 2048, 11008, 16, 2, 151936, **_TIED),
    "qwen2.5-7b": _llama("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _llama("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _llama("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _llama("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": _llama("qwen3", 28, 1024, 3072, 16, 8, 151936, **_QWEN3, **_TIED),
    "qwen3-1.7b": _llama("qwen3", 28, 2048, 6144, 16, 8, 151936, **_QWEN3, **_TIED),
    "qwen3-4b": _llama("qwen3", 36, 2560, 9728, 32, 8, 151936, **_QWEN3, **_TIED),
    "qwen3-8b": _llama("qwen3", 36, 4096, 12288, 32, 8, 151936, **_QWEN3),
    "qwen3-14b": _llama("qwen3", 40, 5120, 17408, 40, 8, 151936, **_QWEN3),
    "qwen3-32b": _llama("qwen3", 64, 5120, 25600, 64, 8, 151936, **_QWEN3),
    "gemma-2b": _llama("gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256),
    "gemma-7b": _llama("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256),
    "t5-small": _t5(6, 512, 2048, 8),
    "t5-base": _t5(12, 768, 3072, 12),
    "t5-large": _t5(24, 1024, 4096, 16),
    "t5-3b": _t5(24, 1024, 16384, 32, 128),
    "t5-11b": _t5(24, 1024, 65536, 128, 128),
    "flan-t5-small": _t5(8, 512, 1024, 6, **_GATED),
    "flan-t5-base": _t5(12, 768, 2048, 12, **_GATED),
    "flan-t5-large": _t5(24, 1024, 2816, 16, **_GATED),
    "flan-t5-xl": _t5(24, 2048, 5120, 32, **_GATED),
    "flan-t5-xxl": _t5(24, 4096, 10240, 64, **_GATED),
    "vit-base-patch16-224": _vit(12, 768, 12, 16, 1000),
    "vit-base-patch32-224": _vit(12, 768, 12, 32, 1000),
    "vit-large-patch16-224": _vit(24, 1024, 16, 16, 1000),
    "vit-huge-patch14-224": _vit(32, 1280, 16, 14, 1000),
}
"""By the name after the organisation's, in lower case."""
