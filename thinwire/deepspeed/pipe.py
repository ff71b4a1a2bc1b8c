"""DeepSpeed's descriptions of a model in stages: layers one after the other, from which `initialize` makes a pipeline.

Every rank builds all layers, and keeps its stage's; inside `torch.device("meta")` it builds shapes, and then its stage.
"""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from thinwire.deepspeed.checkpointing import checkpoint
from thinwire.deepspeed.errors import DeepSpeedUsageError, NotOfferedError
from thinwire.deepspeed.utilities import partition_uniform, set_random_seed
from thinwire.engine import ConfigError, EngineConfig
from thinwire.engine.config.loading import read_json_object, respelled

Loss = Callable[[Any, Any], Tensor]


class LayerSpec:
    """A layer to be built: a class of modules, and its arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec only supports torch.nn.Module types, not {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make it."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """One of several layers that share weights: those of one `key` and class are one module, others its parameters of
    the names in `tied_weight_attr`. `forward_fn`: called with the module and what it is given, in forward's place."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class _Called(nn.Module):
    """A function as a layer; with a module, that by which it is run."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, given: Any) -> Any:
        return self.function(given) if self.module is None else self.function(self.module, given)


class PipelineModule(nn.Sequential):
    """Layers one after the other, each of which takes what the one before gives, a tensor or a tuple of them.

    layers: modules, specs of them, or functions.
    num_stages, topology: how many stages, or a topology that says so.
    loss_fn: of the last layer's output and the labels; None where that output is the loss.
    seed_layers, seed_fn, base_seed: seed before each layer is built, with `base_seed` and its number.
    partition_method: "parameters", "uniform", or "type:" and a regular expression that the names of the classes match
        of which stages get equally many.
    activation_checkpoint_interval: so many layers at a time are run again in backward, by `activation_checkpoint_func`,
        those with parameters or, where given, of the classes named in `checkpointable_layers`.

    Raises TypeError, RuntimeError or NotOfferedError for what cannot be.
    """

    loss_fn: Loss | None

    def __init__(
        self,
        layers: Iterable[LayerSpec | nn.Module | Callable[[Any], Any]],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Loss | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        if dynamic_shape:
            raise NotOfferedError("micro-batches have one shape: leave dynamic_shape out, and pad samples")
        interval, run_again = activation_checkpoint_interval, activation_checkpoint_func
        fits_interval = isinstance(interval, int) and interval >= 0
        for name, value, expected, fits in (
            ("layers", layers, "an iterable of modules, specs and functions", isinstance(layers, Iterable)),
            ("loss_fn", loss_fn, "a function or a module", loss_fn is None or callable(loss_fn)),
            ("partition_method", partition_method, "a text", isinstance(partition_method, str)),
            ("activation_checkpoint_interval", interval, "a number of layers, 0 for none", fits_interval),
            ("activation_checkpoint_func", run_again, "a function", callable(run_again)),
            ("checkpointable_layers", checkpointable_layers, "a list", not isinstance(checkpointable_layers, str)),
        ):
            if not fits:
                raise TypeError(f"{name} is {expected}, not {value!r}")
        super().__init__()
        self.num_stages, self.partition_method = _stages(num_stages, topology), partition_method
        vars(self)["loss_fn"] = loss_fn  # one that is a module is none of the layers
        self.activation_checkpoint_interval, self.activation_checkpoint_func = interval, run_again
        self.checkpointable_layers = checkpointable_layers
        self._topology = topology
        seed = seed_fn or set_random_seed
        self._seed = (lambda number: seed(base_seed + number)) if seed_layers else None
        self._specs: dict[str, LayerSpec] = {}
        tied: dict[str, nn.Module] = {}
        for number, layer in enumerate(layers):
            if self._seed is not None:
                self._seed(number)
            self.add_module(str(number), _built(layer, tied))
            if isinstance(layer, LayerSpec):
                self._specs[str(number)] = layer

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Have the layers that are here begin as their specs build them, other modules as they reset themselves."""
        begun: set[int] = set()  # what is tied begins as the first of its layers
        for name, layer in self.named_children():
            if name not in self._specs:
                for module in layer.modules():
                    getattr(module, "reset_parameters", bool)()
                continue
            if self._seed is not None:
                self._seed(int(name))
            built, own = self._specs[name].build(), layer.module if isinstance(layer, _Called) else layer
            assert own is not None
            for mine, begins in zip(_tensors(own), _tensors(built), strict=True):
                if id(mine) not in begun:
                    mine.copy_(begins)
                begun.add(id(mine))

    def topology(self) -> ProcessTopology | None:
        """What it was given."""
        return self._topology

    def mpu(self) -> NoReturn:
        """Raise NotOfferedError: it knows no ranks."""
        raise NotOfferedError("a PipelineModule is not on its ranks before initialize(): use engine.grid after it")

    def split(self) -> str | list[str]:
        """Where stages begin, as `"pipeline": {"split": ...}` says it."""
        method, count = self.partition_method.lower(), self.num_stages
        if method in ("parameters", "params"):
            return "parameters"
        if method == "uniform":
            return [str(bound) for bound in partition_uniform(len(self), count)[1:-1]]
        if method.startswith("type:"):
            names = [type(layer.module if isinstance(layer, _Called) else layer).__name__ for layer in self]
            try:
                wanted = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            except re.error as error:
                raise RuntimeError(f"partition_method {method!r} is no regular expression: {error}") from error
            found = [number for number, name in enumerate(names) if wanted.search(name)]
            if len(found) < count:
                raise RuntimeError(
                    f"partition_method {method!r} matches {len(found)} of the layers, fewer than {count} stages: their "
                    f"classes are {', '.join(dict.fromkeys(names))}"
                )
            return [str(found[bound]) for bound in partition_uniform(len(found), count)[1:-1]]
        raise NotOfferedError(f"partition_method {method!r} is not offered: use parameters, uniform or type:REGEX")

    @override
    def forward(self, *given: Any) -> Any:
        layers, interval = list(self), self.activation_checkpoint_interval
        for start in range(0, len(layers), interval or max(1, len(layers))):
            some = layers[start : start + (interval or len(layers))]
            run = partial(_run, some)
            again = interval and torch.is_grad_enabled() and self._recomputes(some)
            value = self.activation_checkpoint_func(run, *given) if again else run(*given)
            given = value if isinstance(value, tuple) else (value,)
        return given if len(given) > 1 else given[0]

    def _recomputes(self, layers: Sequence[nn.Module]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        return any(True for layer in layers for _ in layer.parameters())


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _run(layers: Sequence[nn.Module], *given: Any) -> Any:
    value = given if len(given) > 1 else given[0]
    for layer in layers:
        value = layer(value)
        if value is None:
            raise TypeError(f"a layer, {type(layer).__name__}, returned None: a layer returns what the next one takes")
    return value


def _stages(number: Any, topology: Any) -> int:
    """How many stages there are by either."""
    if number is None and topology is None:
        raise RuntimeError("must provide num_stages or topology")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise RuntimeError(f"num_stages is a whole number, at least 1, not {number!r}")
    if topology is None:
        return int(number or 1)
    if not isinstance(topology, ProcessTopology):
        raise TypeError(f"topology is a ProcessTopology, not {topology!r}")
    if topology.get_dim("model") > 1:
        raise NotOfferedError('layers of "model" ranks are not cut by a topology: use "tensor_parallel", or mesh')
    axes = topology.get_axis_names()
    if axes != [one for one in ("pipe", "data", "model") if one in axes]:
        raise NotOfferedError(f'a topology with axes {axes} is not offered: its axes are "pipe" and "data", in order')
    found = max(1, topology.get_dim("pipe"))
    if number not in (None, found):
        raise RuntimeError(f"num_stages is {number}, and the topology has {found}")
    return found


def _built(layer: Any, tied: dict[str, nn.Module]) -> nn.Module:
    """A layer as a module; those of one key take from `tied` what they share."""
    if isinstance(layer, TiedLayerSpec):
        first = tied.get(layer.key)
        module = layer.build() if type(first) is not layer.typename else first
        assert module is not None
        if first is None:
            tied[layer.key] = module
        elif module is not first:
            for name in layer.tied_weight_attr:
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path), last, attrgetter(name)(first))
        return module if layer.forward_fn is None else _Called(layer.forward_fn, module)
    if isinstance(layer, LayerSpec):
        return layer.build()
    if isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, type) or not callable(layer):
        raise TypeError(f"a layer is a module, a LayerSpec, of a class and what it takes, or a function, not {layer!r}")
    return _Called(layer)


def loss_of(model: object, loss_fn: Loss | None = None) -> Loss | None:
    """What finds a model's loss: what is given, or a PipelineModule's own, of which one without is itself the loss."""
    return loss_fn if loss_fn is not None or not isinstance(model, PipelineModule) else model.loss_fn or _output


def _output(output: Any, _labels: Any) -> Tensor:
    if not isinstance(output, Tensor) or output.numel() != 1:
        of_shape = f"has shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"is {type(output).__name__}"
        raise ValueError(
            f"a PipelineModule without loss_fn has its last layer's output for its loss, which is a tensor of one "
            f"number, and this one {of_shape}: give PipelineModule(..., loss_fn=...)"
        )
    return output


def with_stages(config: Any, model: object, ranks: int) -> Any:
    """A configuration of a job of so many ranks, with the stages of a PipelineModule in it; as it is for other models.

    Raises ConfigError where it says otherwise.
    """
    if not isinstance(model, PipelineModule):
        return config
    topology = model.topology()
    if topology is not None and topology.world_size() != ranks:
        raise ConfigError(f"the PipelineModule's topology is of {topology.world_size()} ranks, and {ranks} are here")
    tree = config.describe() if isinstance(config, EngineConfig) else config
    tree = respelled(tree if isinstance(tree, Mapping) else read_json_object(Path(tree)), [])
    section = dict(tree.get("pipeline") or {})
    own: dict[str, Any] = {"stages": model.num_stages, "split": model.split()}
    for key, value in own.items():
        if section.get(key, "auto") not in ("auto", value):
            raise ConfigError(f'"pipeline.{key}" is {section[key]!r}, and the PipelineModule says {value!r}: give one')
    return {**tree, "pipeline": {**section, **own}}


class ProcessTopology:
    """Ranks by their places along named axes, the last of which runs fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        coordinates: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinates
        places = product(*(range(size) for size in self.dims))
        self.mapping = {coordinates(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a place along every axis."""
        if coord_kwargs.keys() != {*self.axes}:
            raise DeepSpeedUsageError(f"get_rank() takes a place along each of {self.axes}, not {coord_kwargs}")
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    def get_coord(self, rank: int) -> Any:
        """A rank's place along every axis."""
        return list(self.mapping)[rank]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's place along other axes than these, for names of files."""
        named = self.get_coord(rank)._asdict().items()
        return outer_sep.join(f"{axis}{inner_sep}{at:02d}" for axis, at in named if axis not in omit_axes)

    def get_axis_names(self) -> list[str]:
        """Of all axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Places along an axis; 0 without it."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks at these places."""
        wanted = filter_kwargs.items()
        return [rank for at, rank in self.mapping.items() if all(getattr(at, axis) == one for axis, one in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks at one place along an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Ranks that differ in their place along an axis only, in lists."""
        others = [one for one in self.axes if one != axis]
        places = product(*(range(self.get_dim(one)) for one in others)) if axis in self.axes else ()
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def world_size(self) -> int:
        """All ranks."""
        return len(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and replicas of each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, replicas, and ranks that share a layer."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
