"""Models by what a user calls them: a well-known name, a configuration on this machine, or any family that transformers
can build without memory for its weights."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.plan.model_families import FAMILIES, built_model, model_of
from thinwire.plan.units import PlanError
from thinwire.plan.workload import Transformer

# What the shapes of well-known models depend on, by the keys of Hugging Face's config.json; what is left out has its
# family's default.

_STACK = ("num_hidden_layers", "hidden_size")
_BERT = (*_STACK, "num_attention_heads", "intermediate_size")
_LLAMA = (*_STACK, "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_KEYS: dict[str, tuple[str, ...]] = {
    "bert": _BERT,
    "roberta": (*_BERT, "vocab_size"),
    "distilbert": (),
    "gpt2": ("n_layer", "n_embd", "n_head"),
    "gpt_neox": (*_BERT, "vocab_size"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    "t5": ("num_layers", "d_model", "d_ff", "num_heads", "d_kv"),
    "vit": (*_BERT, "patch_size", "num_labels"),
}


def _of(family: str, *shape: int, **others: Any) -> dict[str, Any]:
    return {"model_type": family, **dict(zip(_KEYS[family], shape, strict=True)), **others}


_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}
_GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

# By the name after the organisation's, in lower case.
_KNOWN = {
    "bert-tiny": _of("bert", 2, 128, 2, 512),
    "bert-mini": _of("bert", 4, 256, 4, 1024),
    "bert-small": _of("bert", 4, 512, 8, 2048),
    "bert-base": _of("bert", 12, 768, 12, 3072),
    "bert-large": _of("bert", 24, 1024, 16, 4096),
    "bert-base-uncased": _of("bert", 12, 768, 12, 3072),
    "bert-large-uncased": _of("bert", 24, 1024, 16, 4096),
    "bert-base-cased": _of("bert", 12, 768, 12, 3072, vocab_size=28996),
    "bert-large-cased": _of("bert", 24, 1024, 16, 4096, vocab_size=28996),
    "roberta-base": _of("roberta", 12, 768, 12, 3072, 50265, **_ROBERTA),
    "roberta-large": _of("roberta", 24, 1024, 16, 4096, 50265, **_ROBERTA),
    "xlm-roberta-base": _of("roberta", 12, 768, 12, 3072, 250002, **_ROBERTA),
    "xlm-roberta-large": _of("roberta", 24, 1024, 16, 4096, 250002, **_ROBERTA),
    "distilbert-base-uncased": _of("distilbert"),
    "gpt2": _of("gpt2", 12, 768, 12),
    "gpt2-medium": _of("gpt2", 24, 1024, 16),
    "gpt2-large": _of("gpt2", 36, 1280, 20),
    "gpt2-xl": _of("gpt2", 48, 1600, 25),
    "distilgpt2": _of("gpt2", 6, 768, 12),
    "pythia-70m": _of("gpt_neox", 6, 512, 8, 2048, 50304),
    "pythia-160m": _of("gpt_neox", 12, 768, 12, 3072, 50304),
    "pythia-410m": _of("gpt_neox", 24, 1024, 16, 4096, 50304),
    "pythia-1b": _of("gpt_neox", 16, 2048, 8, 8192, 50304),
    "pythia-1.4b": _of("gpt_neox", 24, 2048, 16, 8192, 50304),
    "pythia-2.8b": _of("gpt_neox", 32, 2560, 32, 10240, 50304),
    "pythia-6.9b": _of("gpt_neox", 32, 4096, 32, 16384, 50432),
    "pythia-12b": _of("gpt_neox", 36, 5120, 40, 20480, 50688),
    "llama-2-7b": _of("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _of("llama", 40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _of("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": _of("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": _of("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-8b": _of("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _of("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": _of("llama", 126, 16384, 53248, 128, 8, 128256),
    "llama-3.2-1b": _of("llama", 16, 2048, 8192, 32, 8, 128256, tie_word_embeddings=True),
    "llama-3.2-3b": _of("llama", 28, 3072, 8192, 24, 8, 128256, tie_word_embeddings=True),
    "llama-3.3-70b": _of("llama", 80, 8192, 28672, 64, 8, 128256),
    "tinyllama-1.1b": _of("llama", 22, 2048, 5632, 32, 4, 32000),
    "smollm2-135m": _of("llama", 30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "smollm2-360m": _of("llama", 32, 960, 2560, 15, 5, 49152, tie_word_embeddings=True),
    "smollm2-1.7b": _of("llama", 24, 2048, 8192, 32, 32, 49152, tie_word_embeddings=True),
    "mistral-7b": _of("mistral", 32, 4096, 14336, 32, 8, 32000),
    "qwen2.5-0.5b": _of("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _of("qwen2", 28, 1536, 8960, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-3b": _of("qwen2", 36, 2048, 11008, 16, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _of("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _of("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _of("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _of("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": _of("qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-1.7b": _of("qwen3", 28, 2048, 6144, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-4b": _of("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _of("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _of("qwen3", 40, 5120, 17408, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _of("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
    "gemma-2b": _of("gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256),
    "gemma-7b": _of("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256),
    "t5-small": _of("t5", 6, 512, 2048, 8, 64),
    "t5-base": _of("t5", 12, 768, 3072, 12, 64),
    "t5-large": _of("t5", 24, 1024, 4096, 16, 64),
    "t5-3b": _of("t5", 24, 1024, 16384, 32, 128),
    "t5-11b": _of("t5", 24, 1024, 65536, 128, 128),
    "flan-t5-small": _of("t5", 8, 512, 1024, 6, 64, **_GATED),
    "flan-t5-base": _of("t5", 12, 768, 2048, 12, 64, **_GATED),
    "flan-t5-large": _of("t5", 24, 1024, 2816, 16, 64, **_GATED),
    "flan-t5-xl": _of("t5", 24, 2048, 5120, 32, 64, **_GATED),
    "flan-t5-xxl": _of("t5", 24, 4096, 10240, 64, 64, **_GATED),
    "vit-base-patch16-224": _of("vit", 12, 768, 12, 3072, 16, 1000),
    "vit-base-patch32-224": _of("vit", 12, 768, 12, 3072, 32, 1000),
    "vit-large-patch16-224": _of("vit", 24, 1024, 16, 4096, 16, 1000),
    "vit-huge-patch14-224": _of("vit", 32, 1280, 16, 5120, 14, 1000),
}
MODELS = tuple(_KNOWN)
"""Names that need no configuration."""

_LARGEST_CONFIGURATION = 1 << 20


def named_model(name: str) -> Transformer:
    """The model that a name or path means: a config.json or the folder it is in, one of `MODELS`, with or without its
    organisation, or a model in Hugging Face's cache on this machine. Nothing is downloaded.

    Families other than the formulas' are built by transformers, without memory for their weights.

    Raises PlanError for what is none of these, saying how to give it otherwise.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    short = name.rpartition("/")[2].lower()
    # A folder that happens to be called as a model is none.
    if path.is_file() or (path.suffix == ".json" and short not in _KNOWN):
        return _described(path.parent.name or name if path.name == "config.json" else path.stem, path)
    cached = _in_cache(name)
    if cached is not None:
        return _described(short, cached)
    if short in _KNOWN:
        return model_of(short, _KNOWN[short])
    alike = difflib.get_close_matches(short, MODELS, n=3)
    meant = f"Did you mean {' or '.join(alike)}? " if alike else ""
    organisation = name if "/" in name else f"ORGANISATION/{name}"
    raise PlanError(
        f"model {name!r} is not known here, and not in Hugging Face's cache. {meant}Give its size, --parameters 340M; "
        f"or its configuration, --model path/to/config.json; or fetch that once: hf download {organisation} config.json"
    )


def _described(name: str, path: Path) -> Transformer:
    configuration = _read(path)
    if configuration["model_type"] in FAMILIES:
        return model_of(name, configuration)
    return built_model(name, path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_CONFIGURATION:
            raise PlanError(f"{path} is no configuration of a model: it is larger than 1 MiB")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"the configuration {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the configuration {path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise PlanError(f"{path} is no configuration of Hugging Face's: it has no model_type")
    return found


def _in_cache(name: str) -> Path | None:
    """Of the model's main revision, where it was downloaded once."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = folder / "snapshots" / revision / "config.json"
    return found if found.is_file() else None
