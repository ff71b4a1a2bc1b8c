"""Parameters and shapes of the well-known families, from their configurations: what Hugging Face's classes hold with
the head that a pretraining of the family trains; of other families, what transformers builds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.plan.units import PlanError
from thinwire.plan.workload import Blocks, Matrices, Transformer

__all__ = ["FAMILIES", "built_model", "model_of"]


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
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"the configuration of {self.name}: {key} must be a whole number above 0, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise PlanError(f"the configuration of {self.name}: {key} must be true or false, got {value!r}")
        return value

    def model(self, matrices: list[Matrices], vectors: int, blocks: Blocks, last: Matrices | None) -> Transformer:
        shapes = tuple(matrices)
        return Transformer(self.name, sum(one.numel for one in shapes) + vectors, shapes, last, blocks)


def _bert(read: _Reader) -> Transformer:
    """With a head for masked words, whose output matrix is the embedding. DistilBERT has other keys and no token types;
    RoBERTa, CamemBERT and XLM-RoBERTa are alike."""
    distilled = read.family == "distilbert"
    layers = read.whole("n_layers", 6) if distilled else read.whole("num_hidden_layers", 12)
    width = read.whole("dim" if distilled else "hidden_size", 768)
    heads = read.whole("n_heads" if distilled else "num_attention_heads", 12)
    feed_forward = read.whole("hidden_dim" if distilled else "intermediate_size", 3072)
    positions = read.whole("max_position_embeddings", 512)
    embedding = Matrices(read.whole("vocab_size", 30522), width)
    matrices = [
        embedding,
        Matrices(positions, width),
        *([] if distilled else [Matrices(read.whole("type_vocab_size", 2), width)]),
        Matrices(width, width, 4 * layers + 1),
        Matrices(feed_forward, width, layers),
        Matrices(width, feed_forward, layers),
    ]
    # A layer's biases and two norms; outside: a norm each for embeddings and head, the head's biases.
    vectors = layers * (9 * width + feed_forward) + 5 * width + embedding.rows
    return read.model(matrices, vectors, Blocks(layers, width, heads, min(positions, 512)), embedding)


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
    width, layers, heads = read.whole("hidden_size"), read.whole("num_hidden_layers"), read.whole("num_attention_heads")
    groups, feed_forward = read.whole("num_key_value_heads", heads), read.whole("intermediate_size")
    head = read.whole("head_dim", width // heads)
    embedding = Matrices(read.whole("vocab_size"), width)
    tied = read.flag("tie_word_embeddings", read.family == "gemma")
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
    elif read.family == "qwen2":
        in_a_layer += (heads + 2 * groups) * head
    if read.family == "qwen3":
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
    gates = 1 + str(read.values.get("feed_forward_proj")).startswith("gated")
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
    named = read.values.get("id2label")
    labels = len(named) if isinstance(named, Mapping) else read.whole("num_labels", 2)
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
    return _shapes(name, built, configuration, torch.nn.Embedding)


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
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    layers, width, heads, positions = (getattr(text, key, None) for key in keys)
    blocks = None
    if isinstance(layers, int) and isinstance(width, int) and isinstance(heads, int):
        blocks = Blocks(layers, width, heads, min(positions, 2048) if isinstance(positions, int) else 512)
    return Transformer(name, sum(one.numel() for one in parameters), matrices, last, blocks)
