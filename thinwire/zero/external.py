"""Parameters that a module uses although they are another module's, which stage 3 has to gather for both."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from thinwire.zero.shard_marks import is_sharded, layer_of

__all__ = ["external_parameters", "register_external_parameter", "unregister_external_parameter"]

_ATTRIBUTE = "_external_params"


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Say that `module`'s forward uses a parameter of another module, before the model is given to thinwire.initialize.

    Stage 3 gathers repeated layers one at a time and the rest of the model as a whole. A layer that has a parameter
    which is registered with a module outside of it is not gathered apart, but with the rest. What the rest has is there
    during all of forward and backward, for every module.

    Raises TypeError for what is no module and parameter, and RuntimeError where a layer is gathered apart already that
    has the parameter and not the module.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            "register_external_parameter takes a torch.nn.Module and a torch.nn.Parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    layer = layer_of(parameter)
    if is_sharded(parameter) and layer is not None and all(module is not one for one in layer.modules()):
        raise RuntimeError(
            f"the parameter of shape {tuple(parameter.shape)} belongs to a layer that stage 3 gathers apart, so that "
            f"this {type(module).__name__} would find its shards: register it before thinwire.initialize, in the "
            "module's __init__ say, or read it with GatheredParameters"
        )
    _of(module)[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Take it back, before the model is given to thinwire.initialize. Raises RuntimeError where there is none."""
    if id(parameter) not in _of(module):
        raise RuntimeError("unregister_external_parameter: the parameter is not registered with this module")
    del _of(module)[id(parameter)]


def external_parameters(module: nn.Module) -> Iterable[Tensor]:
    """Those that are registered with a module itself."""
    return _of(module).values()


def _of(module: nn.Module) -> dict[int, Tensor]:
    found: dict[int, Tensor] = module.__dict__.setdefault(_ATTRIBUTE, {})
    return found
