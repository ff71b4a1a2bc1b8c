"""A model made ready to answer: without gradients, in another dtype or 8 bits, and encoders without padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

import thinwire.parallel
from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.inference.quantized import quantize_linears
from thinwire.inference.requests import RequestQueue
from thinwire.transformers import accelerate

if TYPE_CHECKING:
    from thinwire.inference.compiling import Compilation

Quantize = Literal["int8-dynamic", "int8", "int4"]

_OF_CACHES = {"past_key_values", "cache_implementation", "use_cache", "generation_config", "assistant_model"}


class Prepared:
    """What `prepare` makes: call it as the model, without gradients; `model` is the one inside.

    `compiled` has the `graphs` that its layers took so far, `recompiles` among them, and their `guards`; None where
    nothing is compiled. Where ranks hold a part of the model each, all of them call it alike.
    """

    def __init__(self, model: nn.Module, compiled: Compilation | None = None, *, is_cut: bool = False) -> None:
        self.model, self.compiled = model, compiled
        self._is_cut = is_cut

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the model gives."""
        with torch.inference_mode():
            return self.model(*given, **named)

    def generate(self, *given: Any, **named: Any) -> Tensor:
        """What the `generate` of a Hugging Face decoder gives; its cache, if no option names one, grows in place."""
        model: Any = self.model
        if len(given) < 2 and not _OF_CACHES & named.keys() and _takes_growing_cache(model):
            named["past_key_values"] = growing_cache(model.config)
        with torch.inference_mode():
            found: Tensor = model.generate(*given, **named)
        return found

    def queue(self, *, max_tokens: int = 4096, wait: float = 0.005, size: int = 1024) -> RequestQueue:
        """Gather requests of any lengths into batches; a context manager, whose end closes it.

        Args:
            max_tokens: of a batch, padding left out.
            wait: seconds for which a request waits for others, at most.
            size: requests that may wait; one more is refused.

        Raises ValueError for numbers that are too small, or where ranks hold a part of the model each.
        """
        if self._is_cut:
            raise ValueError(
                "a queue makes its batches by the time, which ranks that hold a part of the model each do not share: "
                "call the model with the same batch on all of them"
            )
        device = next((one.device for one in self.model.parameters()), torch.device("cpu"))
        return RequestQueue(self, device, _longest(self.model), max_tokens=max_tokens, wait=wait, size=size)


def prepare(
    model: nn.Module | str | Path,
    dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
    tensor_parallel: int = 1,
    compile: bool = False,
) -> Prepared:
    """Make a model ready for inference; `model` itself stays as it is.

    Args:
        model: any module, or a folder that `save_pretrained` or `thinwire checkpoint export` wrote, read with the
            class that its configuration names.
        dtype: of weights and computation; None leaves it.
        quantize: "int8-dynamic": linear layers in 8 bits, inputs too, on CPUs in fp32: the fastest. "int8", "int4":
            their weights alone, on CPUs in bf16; "int4", the smallest, leaves layers that are not [16 n, 64 m].
            Embeddings, norms and attention stay.
        tensor_parallel: ranks that share the matrices of each layer, as `thinwire.parallel.parallelize` cuts them; so
            many in a row, of torch's process group, hold a model. All call it alike, and have the first one's weights.
        compile: layers by `torch.compile`, without their attention. Off, as on CPUs matrices take most of the time,
            and what is compiled between them gains nothing.

    Encoders that `thinwire.transformers.accelerate` knows compute no padding; GPT-2's GELU is one operation. Quantised
    layers have no `weight` in the `state_dict`: save the model that was given.

    Collective where `tensor_parallel` > 1. Raises ValueError for another name, a device or dtype without such a kernel,
    a model without a linear layer to quantise or that ranks cannot share, `tensor_parallel` without as many ranks or
    with what it does not go with; FileNotFoundError for a folder without a configuration; RuntimeError for `compile`
    without a compiler.
    """

    def read() -> nn.Module:
        return _read(Path(model)) if isinstance(model, str | Path) else copy.deepcopy(model)

    return prepare_itself(read, dtype, quantize, tensor_parallel, compile)


def prepare_itself(
    read: Callable[[], nn.Module],
    dtype: torch.dtype | None,
    quantize: Quantize | None,
    tensor_parallel: int,
    compile: bool,
) -> Prepared:
    """Make what `read` gives ready, no copy of it; as `prepare` does."""
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(f"quantize is {quantize!r}, expected None or {', '.join(map(repr, get_args(Quantize)))}")
    if tensor_parallel != 1:
        if quantize is not None or compile:
            other = "compile" if quantize is None else "quantize"
            raise ValueError(f"tensor_parallel={tensor_parallel} does not go with {other}: leave one of them out")
        mesh = _mesh(tensor_parallel)
        made = on_every_rank(Communicator.of(mesh), read, "read its model", (ValueError, OSError))
    else:
        made = read()
    made.to(dtype).eval().requires_grad_(False)
    if tensor_parallel != 1:
        thinwire.parallel.parallelize(made, mesh)
    if quantize is not None:
        _quantize(made, quantize)
    with suppress(TypeError, ValueError):  # no encoder that it knows
        accelerate(made)
    for parent in list(made.modules()):
        for name, layer in parent.named_children():
            if type(layer).__name__ == "NewGELUActivation":  # eight operations of transformers', for the same
                setattr(parent, name, nn.GELU("tanh"))
    if compile:
        from thinwire.inference.compiling import compile_layers

        return Prepared(made, compile_layers(made))
    return Prepared(made, is_cut=tensor_parallel != 1)


def _mesh(ranks: int) -> DeviceMesh:
    """So many ranks in a row, this one among them."""
    size = dist.get_world_size() if dist.is_initialized() else 0
    if ranks < 1 or not size or size % ranks:
        found = f"torch.distributed has {size}" if size else "torch.distributed has no process group"
        raise ValueError(
            f"tensor_parallel={ranks}, and {found}: expected a multiple of as many ranks, by torchrun or mpirun and "
            "torch.distributed.init_process_group"
        )
    device = "cuda" if Communicator.of(dist.group.WORLD).backend == "nccl" else "cpu"
    return init_device_mesh(device, (size // ranks, ranks), mesh_dim_names=("dp", "tp"))["tp"]


def _takes_growing_cache(model: Any) -> bool:
    """If `generate` would take a cache of its own that copies what it has for each token."""
    config = getattr(model, "generation_config", None)
    return (
        config is not None
        and config.use_cache is not False
        and config.cache_implementation is None
        and not model.config.is_encoder_decoder
        and model._supports_default_dynamic_cache()
    )


def growing_cache(config: Any) -> Any:
    """The cache that `generate` takes by default, for a model of this configuration, in memory that grows by doubling:
    a token is written behind those before it, where it would copy them all."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
        """`keys` and `values` [B, H, S, D] begin `rooms`; others put in their place, by beams, get rooms anew."""

        keys: Tensor
        values: Tensor
        rooms: tuple[Tensor, Tensor]

        @override
        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            self.keys, self.values = self.rooms = key_states[..., :0, :], value_states[..., :0, :]

        @override
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            keys, self.keys = _append(self.rooms[0], self.keys, key_states)
            values, self.values = _append(self.rooms[1], self.values, value_states)
            self.rooms = keys, values
            return self.keys, self.values

    cache = DynamicCache(config=config.get_text_config(decoder=True))
    made: Any = GrowingLayer
    cache.layers = [made() if type(one) is DynamicLayer else one for one in cache.layers]
    return cache


def _append(room: Tensor, kept: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """A room, and what it has then: `kept` and behind it `added`; the room that is there, if it holds `kept`."""
    begin, end = kept.shape[-2], kept.shape[-2] + added.shape[-2]
    fits = room.data_ptr() == kept.data_ptr() and room.shape[0] == added.shape[0] and room.shape[-2] >= end
    if not fits:
        room = added.new_empty(*added.shape[:-2], 2 * end, added.shape[-1])
        room[..., :begin, :] = kept
    room[..., begin:end, :] = added
    return room, room[..., :end, :]


def _quantize(model: nn.Module, how: Quantize) -> None:
    expected = torch.float32 if how == "int8-dynamic" else torch.bfloat16
    kinds = {(one.device.type, one.dtype) for one in model.parameters()}
    if kinds - {("cpu", expected)}:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(
            f'quantize="{how}" is for {expected} on CPUs, got {found}: give dtype={expected}; '
            "elsewhere use torchao.quantize_"
        )
    if not quantize_linears(model, how):
        raise ValueError(f"{type(model).__name__} has no linear layer that {how} takes: leave quantize out")


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
