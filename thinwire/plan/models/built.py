"""Models of any family that transformers knows: built from their configuration without memory, and looked at."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from thinwire.plan.errors import PlanError
from thinwire.plan.workload import Blocks, Matrices, Transformer

__all__ = ["built_model"]


def built_model(name: str, path: Path) -> Transformer:
    """The model of the configuration in `path`, as its "architectures" says, else without a head.

    Raises PlanError where transformers is not installed or does not know it. Runs no code that came with a model.
    """
    try:
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
    return _shapes(name, built, configuration)


def _class_of(transformers: Any, configuration: Any) -> Any:
    architecture = (getattr(configuration, "architectures", None) or [""])[0]
    found = getattr(transformers, architecture, None)
    return found if found is not None else transformers.AutoModel.from_config


def _shapes(name: str, built: torch.nn.Module, configuration: Any) -> Transformer:
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
    whole = [getattr(text, key, None) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
    blocks = None
    if all(isinstance(one, int) for one in whole):
        layers, width, heads = whole
        positions = getattr(text, "max_position_embeddings", None)
        blocks = Blocks(layers, width, heads, min(positions, 2048) if isinstance(positions, int) else 512)  # type: ignore[arg-type]
    return Transformer(name, sum(one.numel() for one in parameters), matrices, last, blocks)
