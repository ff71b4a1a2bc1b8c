"""Models by what a user calls them: a well-known name, a configuration on this machine, or any family that transformers
can build without memory for its weights; parameters and shapes of the well-known families, as Hugging Face's classes
hold them with the head that a pretraining of the family trains."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.plan.units import PlanError
from thinwire.plan.workload import Blocks, Matrices, Transformer


def model_of(name: str, configuration: Mapping[str, Any]) -> Transformer:
    """The model that `configuration` describes, one of `FAMILIES` by its model_type.

    Raises PlanError for a configuration that lacks a number or has one of another kind.
    """
    return FAMILIES[configuration["model_type"]](_Reader(name, configuration))


class _Reader:
    """A configuration whose values are checked as they are read."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.family = str(values["model_type"])
        self.values = values

    def whole(self, key: str, default: int | None = None) -> int:
        number: int = self._value(key, default, "a whole number above 0", lambda one: type(one) is int and one > 0)
        return number

    def flag(self, key: str, default: bool) -> bool:
        truth: bool = self._value(key, default, "true or false", lambda one: type(one) is bool)
        return truth

    def _value(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        given = self.values.get(key)
        value = default if given is None else given
        if not fits(value):
            raise PlanError(f"the configuration of {self.name}: {key} must be {expected}, got {value!r}")
        return value

    def model(self, matrices: list[Matrices], vectors: int, blocks: Blocks) -> Transformer:
        """The first of the matrices is the embedding."""
        return Transformer(
            self.name, sum(one.numel for one in matrices) + vectors, tuple(matrices), matrices[0], blocks
        )

    def classic(
        self, blocks: Blocks, feed_forward: int, outside: list[Matrices], attention: list[Matrices], vectors: int
    ) -> Transformer:
        """Layers with `attention`, two matrices after it, biases everywhere and two norms; what is `outside` of them,
        the embedding first."""
        width, layers = blocks.hidden, blocks.layers
        after = [Matrices(feed_forward, width, layers), Matrices(width, feed_forward, layers)]
        return self.model([*outside, *attention, *after], layers * (9 * width + feed_forward) + vectors, blocks)

    def head(self, embedding: Matrices, tied: bool) -> list[Matrices]:
        """The matrix behind the layers, if it is not the embedding."""
        return [] if self.flag("tie_word_embeddings", tied) else [Matrices(embedding.rows, embedding.columns)]


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


def _bert(read: _Reader) -> Transformer:
    """With a head for masked words, whose output matrix is the embedding. DistilBERT has other keys and no token types;
    RoBERTa, CamemBERT and XLM-RoBERTa are alike."""
    distilled = read.family == "distilbert"
    keys = ("n_layers", "dim", "n_heads", "hidden_dim") if distilled else _SIZES
    layers, width, heads, feed_forward = map(read.whole, keys, (6 if distilled else 12, 768, 12, 3072))
    positions, vocabulary = read.whole("max_position_embeddings", 512), read.whole("vocab_size", 30522)
    outside = [Matrices(vocabulary, width), Matrices(positions, width)]
    if not distilled:
        outside.append(Matrices(read.whole("type_vocab_size", 2), width))
    # Outside of layers: a norm each for embeddings and head, the head's biases.
    blocks = Blocks(layers, width, heads, min(positions, 512))
    return read.classic(blocks, feed_forward, outside, [Matrices(width, width, 4 * layers + 1)], 5 * width + vocabulary)


def _gpt2(read: _Reader) -> Transformer:
    width, layers, positions = read.whole("n_embd", 768), read.whole("n_layer", 12), read.whole("n_positions", 1024)
    outside = [Matrices(read.whole("vocab_size", 50257), width), Matrices(positions, width)]
    attention = [Matrices(width, 3 * width, layers), Matrices(width, width, layers)]
    blocks = Blocks(layers, width, read.whole("n_head", 12), positions)
    return read.classic(blocks, read.whole("n_inner", 4 * width), outside, attention, 2 * width)


def _gpt_neox(read: _Reader) -> Transformer:
    layers, width, heads, feed_forward = map(read.whole, _SIZES, (44, 6144, 64, 24576))
    embedding = Matrices(read.whole("vocab_size", 50432), width)
    attention = [Matrices(3 * width, width, layers), Matrices(width, width, layers)]
    blocks = Blocks(layers, width, heads, min(read.whole("max_position_embeddings", 2048), 2048))
    return read.classic(blocks, feed_forward, [embedding, *read.head(embedding, False)], attention, 2 * width)


def _llama(read: _Reader) -> Transformer:
    """LlamaForCausalLM, and Mistral, Qwen2, Qwen3 and Gemma, which differ by biases, norms and a tied head."""
    width, layers, heads = read.whole("hidden_size"), read.whole("num_hidden_layers"), read.whole("num_attention_heads")
    groups, feed_forward = read.whole("num_key_value_heads", heads), read.whole("intermediate_size")
    head = read.whole("head_dim", width // heads)
    embedding = Matrices(read.whole("vocab_size"), width)
    matrices = [
        embedding,
        *read.head(embedding, read.family == "gemma"),
        Matrices(heads * head, width, layers),
        Matrices(groups * head, width, 2 * layers),
        Matrices(width, heads * head, layers),
        Matrices(feed_forward, width, 2 * layers),
        Matrices(width, feed_forward, layers),
    ]
    in_a_layer = 2 * width
    if read.flag("attention_bias", False):
        in_a_layer += (heads + 2 * groups) * head + width
    elif read.family == "qwen2":
        in_a_layer += (heads + 2 * groups) * head
    if read.family == "qwen3":
        in_a_layer += 2 * head
    if read.flag("mlp_bias", False):
        in_a_layer += 2 * feed_forward + width
    positions = min(read.whole("max_position_embeddings", 2048), 2048)
    return read.model(matrices, layers * in_a_layer + width, Blocks(layers, width, heads, positions))


def _t5(read: _Reader) -> Transformer:
    """T5ForConditionalGeneration; version 1.1, FLAN's, has a gate and a head of its own."""
    width, inner = read.whole("d_model", 512), read.whole("num_heads", 8) * read.whole("d_kv", 64)
    heads, feed_forward = read.whole("num_heads", 8), read.whole("d_ff", 2048)
    encoder = read.whole("num_layers", 6)
    decoder = read.whole("num_decoder_layers", encoder)
    gates = 1 + str(read.values.get("feed_forward_proj")).startswith("gated")
    embedding = Matrices(read.whole("vocab_size", 32128), width)
    attentions = encoder + 2 * decoder
    matrices = [
        embedding,
        *read.head(embedding, True),
        Matrices(inner, width, 3 * attentions),
        Matrices(width, inner, attentions),
        Matrices(feed_forward, width, gates * (encoder + decoder)),
        Matrices(width, feed_forward, encoder + decoder),
        Matrices(read.whole("relative_attention_num_buckets", 32), heads, 2),
    ]
    vectors = width * (2 * encoder + 3 * decoder + 2)
    return read.model(matrices, vectors, Blocks(encoder + decoder, width, heads, 512))


def _vit(read: _Reader) -> Transformer:
    """ViTForImageClassification. A sequence is the patches of one image."""
    layers, width, heads, feed_forward = map(read.whole, _SIZES, (12, 768, 12, 3072))
    patch = read.whole("patch_size", 16)
    patches = (read.whole("image_size", 224) // patch) ** 2
    named = read.values.get("id2label")
    labels = len(named) if isinstance(named, Mapping) else read.whole("num_labels", 2)
    first = Matrices(width, read.whole("num_channels", 3) * patch**2)
    outside = [first, Matrices(patches + 1, width), Matrices(labels, width)]
    blocks = Blocks(layers, width, heads, patches + 1)
    return read.classic(blocks, feed_forward, outside, [Matrices(width, width, 4 * layers)], 4 * width + labels)


FAMILIES: dict[str, Callable[[_Reader], Transformer]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "distilbert"), _bert),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _llama),
    "t5": _t5,
    "vit": _vit,
}
"""By Hugging Face's model_type."""


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
            architecture = (getattr(configuration, "architectures", None) or [""])[0]
            make = getattr(transformers, architecture, transformers.AutoModel.from_config)
            built = make(configuration)
    except Exception as error:  # whatever a configuration makes transformers do
        raise PlanError(f"transformers cannot build {name} from {path}: {error}; give --parameters 340M") from error
    parameters = [one for one in built.parameters() if one.requires_grad]
    # Convolutions count as the matrices that PowerSGD takes them for.
    shapes = Counter((one.shape[0], one[0].numel()) for one in parameters if one.dim() > 1)
    matrices = tuple(Matrices(rows, columns, count) for (rows, columns), count in shapes.items())
    embedding = getattr(built, "get_input_embeddings", lambda: None)()
    last = None
    if isinstance(embedding, torch.nn.Embedding):
        last = next((one for one in matrices if (one.rows, one.columns) == embedding.weight.shape), None)
        if last is not None and last.count > 1:
            rest = Matrices(last.rows, last.columns, last.count - 1)
            last = Matrices(last.rows, last.columns)
            matrices = (last, rest, *(one for one in matrices if one.rows != last.rows or one.columns != last.columns))
    text = configuration.get_text_config()
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    layers, width, heads, positions = (getattr(text, key, None) for key in keys)
    blocks = None
    if isinstance(layers, int) and isinstance(width, int) and isinstance(heads, int):
        blocks = Blocks(layers, width, heads, min(positions, 2048) if isinstance(positions, int) else 512)
    return Transformer(name, sum(one.numel() for one in parameters), matrices, last, blocks)


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
    "gpt3-175b": _of("gpt2", 96, 12288, 96, n_positions=2048),
    "gpt-1t": _of("gpt2", 128, 25600, 160, vocab_size=51200, n_positions=2048),
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
        if path.stat().st_size > _LARGEST_CONFIGURATION or not path.is_file():
            raise PlanError(f"{path} is no configuration of a model: it is no regular file, or larger than 1 MiB")
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
