"""Models by what a user calls them: a well-known name, a configuration on this machine, or any family that transformers
can build without memory for its weights."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.plan.model_families import FAMILIES, model_of
from thinwire.plan.units import PlanError
from thinwire.plan.workload import Blocks, Matrices, Transformer

__all__ = ["KNOWN", "MODELS", "Configuration", "built_model", "named_model"]

# Other families


def built_model(name: str, path: Path) -> Transformer:
    """The model of the configuration in `path`, as its "architectures" says, else without a head.

    Raises PlanError where transformers is not installed or does not know it. Runs no code that came with a model.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise PlanError(
            f"the family of {name} is known to transformers alone, which is not installed: pip install 'thinwire[hf]', "
            "or give its size, --parameters 340M"
        ) from None
    try:
        configuration = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            built = _class_of(transformers, configuration)(configuration)
    except Exception as error:  # whatever a configuration makes transformers do
        raise PlanError(f"transformers cannot build {name} from {path}: {error}; give --parameters 340M") from error
    return _shapes(name, built, configuration, torch.nn.Embedding)


def _class_of(transformers: Any, configuration: Any) -> Any:
    architecture = (getattr(configuration, "architectures", None) or [""])[0]
    found = getattr(transformers, architecture, None)
    return found if found is not None else transformers.AutoModel.from_config


def _shapes(name: str, built: Any, configuration: Any, embedding_class: Any) -> Transformer:
    parameters = [one for one in built.parameters() if one.requires_grad]
    # Convolutions count as the matrices that PowerSGD takes them for.
    shapes = Counter((one.shape[0], one[0].numel()) for one in parameters if one.dim() > 1)
    matrices = tuple(Matrices(rows, columns, count) for (rows, columns), count in shapes.items())
    embedding = getattr(built, "get_input_embeddings", lambda: None)()
    last = None
    if isinstance(embedding, embedding_class):
        last = next((one for one in matrices if (one.rows, one.columns) == embedding.weight.shape), None)
        if last is not None and last.count > 1:
            rest = Matrices(last.rows, last.columns, last.count - 1)
            last = Matrices(last.rows, last.columns)
            matrices = (last, rest, *(one for one in matrices if one.rows != last.rows or one.columns != last.columns))
    text = configuration.get_text_config()
    whole = [getattr(text, key, None) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
    blocks = None
    if all(isinstance(one, int) for one in whole):
        layers, width, heads = whole
        positions = getattr(text, "max_position_embeddings", None)
        blocks = Blocks(layers, width, heads, min(positions, 2048) if isinstance(positions, int) else 512)  # type: ignore[arg-type]
    return Transformer(name, sum(one.numel() for one in parameters), matrices, last, blocks)


# Well-known models: what their shapes depend on, by the keys of Hugging Face's config.json; what is left out has its
# family's default

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


MODELS = tuple(KNOWN)
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
    if path.is_file() or (path.suffix == ".json" and short not in KNOWN):
        return _described(path.parent.name or name if path.name == "config.json" else path.stem, path)
    cached = _in_cache(name)
    if cached is not None:
        return _described(short, cached)
    if short in KNOWN:
        return model_of(short, KNOWN[short])
    raise PlanError(_unknown(name, short))


def _described(name: str, path: Path) -> Transformer:
    configuration = _read(path)
    if configuration.get("model_type") in FAMILIES:
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


def _unknown(name: str, short: str) -> str:
    alike = difflib.get_close_matches(short, MODELS, n=3)
    meant = f"Did you mean {' or '.join(alike)}? " if alike else ""
    organisation = name if "/" in name else f"ORGANISATION/{name}"
    return (
        f"model {name!r} is not known here, and not in Hugging Face's cache. {meant}Give its size, --parameters 340M; "
        f"or its configuration, --model path/to/config.json; or fetch that once: hf download {organisation} config.json"
    )
