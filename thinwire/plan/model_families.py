"""Parameters and shapes of the well-known families, from their configurations: what Hugging Face's classes hold with
the head that a pretraining of the family trains; of other families, what transformers builds."""

from __future__ import annotations

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
