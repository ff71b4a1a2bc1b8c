"""A model made ready to answer: without gradients, in another dtype or 8 bits, and encoders without padding."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thinwire.inference.quantized import quantize_linears
from thinwire.inference.requests import RequestQueue
from thinwire.transformers import accelerate

Quantize = Literal["int8-dynamic"]


class Prepared:
    """What `prepare` makes: call it as the model, without gradients; `model` is the one inside."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the model gives."""
        with torch.inference_mode():
            return self.model(*given, **named)

    def generate(self, *given: Any, **named: Any) -> Tensor:
        """What the `generate` of a Hugging Face decoder gives, with its cache of keys and values."""
        model: Any = self.model
        with torch.inference_mode():
            found: Tensor = model.generate(*given, **named)
        return found

    def queue(self, *, max_tokens: int = 4096, wait: float = 0.005, size: int = 1024) -> RequestQueue:
        """Gather requests of any lengths into batches; a context manager, whose end closes it.

        Args:
            max_tokens: of a batch, padding left out.
            wait: seconds for which a request waits for others, at most.
            size: requests that may wait; one more is refused.

        Raises ValueError for numbers that are too small.
        """
        device = next((one.device for one in self.model.parameters()), torch.device("cpu"))
        return RequestQueue(self, device, _longest(self.model), max_tokens=max_tokens, wait=wait, size=size)


def prepare(
    model: nn.Module | str | Path, dtype: torch.dtype | None = None, quantize: Quantize | None = None
) -> Prepared:
    """Make a model ready for inference; `model` itself stays as it is.

    Args:
        model: any module, or a folder that `save_pretrained` or `thinwire checkpoint export` wrote, read with the
            class that its configuration names.
        dtype: of weights and computation; None leaves it.
        quantize: "int8-dynamic": linear layers in 8 bits, on CPUs in fp32; embeddings, norms and attention stay.

    Encoders that `thinwire.transformers.accelerate` knows compute no padding. Quantised layers have no `weight` in the
    `state_dict`: save the model that was given.

    Raises ValueError for another name, a device or dtype without such a kernel, or a model without a linear layer to
    quantise; FileNotFoundError for a folder without a configuration.
    """
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(f"quantize is {quantize!r}, expected None or {', '.join(map(repr, get_args(Quantize)))}")
    made = _read(Path(model)) if isinstance(model, str | Path) else copy.deepcopy(model)
    made = made.to(dtype).eval().requires_grad_(False)
    if quantize is not None:
        _quantize(made)
    with suppress(TypeError, ValueError):  # no encoder that it knows
        accelerate(made)
    return Prepared(made)


def _quantize(model: nn.Module) -> None:
    kinds = {(one.device.type, one.dtype) for one in model.parameters()}
    if kinds - {("cpu", torch.float32)}:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(f'quantize="int8-dynamic" is for fp32 on CPUs, got {found}; elsewhere use torchao.quantize_')
    if not quantize_linears(model):
        raise ValueError(f"{type(model).__name__} has no linear layer large enough to quantise: leave quantize out")


def _read(folder: Path) -> nn.Module:
    """A Hugging Face model by the class that its configuration names."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: give a folder that save_pretrained wrote, or a module")
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    if not names:
        raise ValueError(f"{folder}/config.json names no class of transformers in architectures: give the model itself")
    model: nn.Module = getattr(transformers, names[0]).from_pretrained(folder, config=config)
    return model


def _longest(model: nn.Module) -> int | None:
    """Tokens that a model can read, if its configuration says so; RoBERTa's table has rows that no token uses."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = [vars(one)["_modules"].get("position_embeddings") for one in model.modules()]
    unused = max((one.padding_idx + 1 for one in tables if getattr(one, "padding_idx", None) is not None), default=0)
    return None if longest is None else int(longest) - unused
