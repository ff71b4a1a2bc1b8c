"""Parameters and shapes of the well-known families, from their configurations: what Hugging Face's classes hold with
the head that a pretraining of the family trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thinwire.plan.units import PlanError
from thinwire.plan.workload import Blocks, Matrices, Transformer

__all__ = ["FAMILIES", "model_of"]

Configuration = Mapping[str, Any]


def model_of(name: str, configuration: Configuration) -> Transformer:
    """The model that `configuration` describes, one of `FAMILIES` by its model_type.

    Raises PlanError for another family, or a configuration that lacks a number or has one of another kind.
    """
    kind = configuration.get("model_type")
    if kind not in FAMILIES:
        raise PlanError(f"{name} is of model_type {kind!r}, none of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind](_Reader(name, configuration))


class _Reader:
    """A configuration whose values are checked as they are read."""

    def __init__(self, name: str, values: Configuration) -> None:
        self.name = name
        self._values = values

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1; raises PlanError for what is none."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"the configuration of {self.name}: {key} must be a whole number above 0, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise PlanError(f"the configuration of {self.name}: {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._values.get(key) or default)

    def labels(self) -> int:
        named = self._values.get("id2label")
        return len(named) if isinstance(named, Mapping) else self.whole("num_labels", 2)

    def model(self, matrices: list[Matrices], vectors: int, blocks: Blocks, last: Matrices | None) -> Transformer:
        shapes = tuple(matrices)
        return Transformer(self.name, sum(one.numel for one in shapes) + vectors, shapes, last, blocks)


def _bert(read: _Reader) -> Transformer:
    """BertForMaskedLM, and RoBERTa's, CamemBERT's and XLM-RoBERTa's."""
    blocks = _blocks(read, "num_hidden_layers", "hidden_size", "num_attention_heads", layers=12)
    return _encoder(read, blocks, read.whole("intermediate_size", 3072), read.whole("type_vocab_size", 2))


def _distilbert(read: _Reader) -> Transformer:
    """DistilBertForMaskedLM: as BERT, without token types."""
    return _encoder(read, _blocks(read, "n_layers", "dim", "n_heads", layers=6), read.whole("hidden_dim", 3072), 0)


def _blocks(read: _Reader, depth: str, width: str, heads: str, *, layers: int) -> Blocks:
    positions = min(read.whole("max_position_embeddings", 512), 512)
    return Blocks(read.whole(depth, layers), read.whole(width, 768), read.whole(heads, 12), positions)


def _encoder(read: _Reader, blocks: Blocks, feed_forward: int, types: int) -> Transformer:
    """With a head for masked words, whose output matrix is the embedding."""
    width, layers = blocks.hidden, blocks.layers
    embedding = Matrices(read.whole("vocab_size", 30522), width)
    matrices = [
        embedding,
        Matrices(read.whole("max_position_embeddings", 512), width),
        *([Matrices(types, width)] if types else []),
        Matrices(width, width, 4 * layers + 1),
        Matrices(feed_forward, width, layers),
        Matrices(width, feed_forward, layers),
    ]
    # A layer's biases and two norms; outside: a norm each for embeddings and head, the head's biases.
    vectors = layers * (9 * width + feed_forward) + 5 * width + embedding.rows
    return read.model(matrices, vectors, blocks, embedding)


def _gpt2(read: _Reader) -> Transformer:
    width, layers, positions = read.whole("n_embd", 768), read.whole("n_layer", 12), read.whole("n_positions", 1024)
    feed_forward = read.whole("n_inner", 4 * width)
    embedding = Matrices(read.whole("vocab_size", 50257), width)
    matrices = [
        embedding,
        Matrices(positions, width),
        Matrices(width, 3 * width, layers),
        Matrices(width, width, layers),
        Matrices(width, feed_forward, layers),
        Matrices(feed_forward, width, layers),
    ]
    vectors = layers * (9 * width + feed_forward) + 2 * width
    return read.model(matrices, vectors, Blocks(layers, width, read.whole("n_head", 12), positions), embedding)


def _gpt_neox(read: _Reader) -> Transformer:
    width, layers = read.whole("hidden_size", 6144), read.whole("num_hidden_layers", 44)
    feed_forward, vocabulary = read.whole("intermediate_size", 24576), read.whole("vocab_size", 50432)
    positions = read.whole("max_position_embeddings", 2048)
    tied = read.flag("tie_word_embeddings", False)
    embedding = Matrices(vocabulary, width)
    matrices = [
        embedding,
        *([] if tied else [Matrices(vocabulary, width, 1)]),
        Matrices(3 * width, width, layers),
        Matrices(width, width, layers),
        Matrices(feed_forward, width, layers),
        Matrices(width, feed_forward, layers),
    ]
    vectors = layers * (9 * width + feed_forward) + 2 * width
    heads = read.whole("num_attention_heads", 64)
    return read.model(matrices, vectors, Blocks(layers, width, heads, min(positions, 2048)), embedding)


def _llama(read: _Reader) -> Transformer:
    """LlamaForCausalLM, and Mistral, Qwen2, Qwen3 and Gemma, which differ by biases, norms and a tied head."""
    kind = read.text("model_type", "llama")
    width, layers, heads = read.whole("hidden_size"), read.whole("num_hidden_layers"), read.whole("num_attention_heads")
    groups, feed_forward = read.whole("num_key_value_heads", heads), read.whole("intermediate_size")
    head = read.whole("head_dim", width // heads)
    embedding = Matrices(read.whole("vocab_size"), width)
    tied = read.flag("tie_word_embeddings", kind == "gemma")
    matrices = [
        embedding,
        *([] if tied else [Matrices(embedding.rows, width, 1)]),
        Matrices(heads * head, width, layers),
        Matrices(groups * head, width, 2 * layers),
        Matrices(width, heads * head, layers),
        Matrices(feed_forward, width, 2 * layers),
        Matrices(width, feed_forward, layers),
    ]
    in_a_layer = 2 * width
    if read.flag("attention_bias", False):
        in_a_layer += (heads + 2 * groups) * head + width
    elif kind == "qwen2":
        in_a_layer += (heads + 2 * groups) * head
    if kind == "qwen3":
        in_a_layer += 2 * head
    if read.flag("mlp_bias", False):
        in_a_layer += 2 * feed_forward + width
    positions = min(read.whole("max_position_embeddings", 2048), 2048)
    return read.model(matrices, layers * in_a_layer + width, Blocks(layers, width, heads, positions), embedding)


def _t5(read: _Reader) -> Transformer:
    """T5ForConditionalGeneration; version 1.1, FLAN's, has a gate and a head of its own."""
    width, inner = read.whole("d_model", 512), read.whole("num_heads", 8) * read.whole("d_kv", 64)
    heads, feed_forward = read.whole("num_heads", 8), read.whole("d_ff", 2048)
    encoder = read.whole("num_layers", 6)
    decoder = read.whole("num_decoder_layers", encoder)
    gates = 1 + read.text("feed_forward_proj", "relu").startswith("gated")
    embedding = Matrices(read.whole("vocab_size", 32128), width)
    attentions = encoder + 2 * decoder
    matrices = [
        embedding,
        *([] if read.flag("tie_word_embeddings", True) else [Matrices(embedding.rows, width, 1)]),
        Matrices(inner, width, 3 * attentions),
        Matrices(width, inner, attentions),
        Matrices(feed_forward, width, gates * (encoder + decoder)),
        Matrices(width, feed_forward, encoder + decoder),
        Matrices(read.whole("relative_attention_num_buckets", 32), heads, 2),
    ]
    vectors = width * (2 * encoder + 3 * decoder + 2)
    return read.model(matrices, vectors, Blocks(encoder + decoder, width, heads, 512), embedding)


def _vit(read: _Reader) -> Transformer:
    """ViTForImageClassification. A sequence is the patches of one image."""
    width, layers = read.whole("hidden_size", 768), read.whole("num_hidden_layers", 12)
    heads = read.whole("num_attention_heads", 12)
    feed_forward, patch = read.whole("intermediate_size", 3072), read.whole("patch_size", 16)
    patches = (read.whole("image_size", 224) // patch) ** 2
    labels = read.labels()
    first = Matrices(width, read.whole("num_channels", 3) * patch**2)
    matrices = [
        first,
        Matrices(patches + 1, width),
        Matrices(width, width, 4 * layers),
        Matrices(feed_forward, width, layers),
        Matrices(width, feed_forward, layers),
        Matrices(labels, width),
    ]
    vectors = layers * (9 * width + feed_forward) + 4 * width + labels
    return read.model(matrices, vectors, Blocks(layers, width, heads, patches + 1), first)


FAMILIES: dict[str, Callable[[_Reader], Transformer]] = {
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma": _llama,
    "t5": _t5,
    "vit": _vit,
}
"""By Hugging Face's model_type."""
