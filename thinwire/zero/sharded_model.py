"""A model that stage 3 has sharded, as DeepSpeed's users look at one: what its parameters say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.zero.fsdp import local_run
from thinwire.zero.parameter_shard import ZeroParamStatus, describe, set_status
from thinwire.zero.shard_marks import mark

__all__ = ["describe_sharded"]

_OURS = ("ds_", "_thinwire_")


def describe_sharded(model: nn.Module, comm: Communicator) -> None:
    """Give every parameter `ds_id`, `ds_shape`, `ds_numel`, `ds_status` and `ds_tensor`, this rank's elements, flat."""
    from torch.distributed.fsdp import FSDPModule  # half a second that only stage 3 should cost

    for module in model.modules():  # outer ones first
        layer = module if isinstance(module, FSDPModule) and module is not model else None
        if module is model or layer is not None:
            for parameter in module.parameters():
                describe(parameter, parameter.shape, local_run(parameter)[1])
                mark(parameter, comm, layer)
            _describe_gathered(module, list(_places(module)))


def _describe_gathered(layer: nn.Module, sharded: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Have the whole parameters that a layer's first forward finds in the model's place say the same. torch keeps
    these objects, and gathers into them again."""

    def describe_once(*_: object) -> None:
        for module, name, parameter in sharded:
            shown = module._parameters.get(name)
            if shown is not None and shown is not parameter:
                shown.__dict__.update({key: value for key, value in vars(parameter).items() if key.startswith(_OURS)})
                set_status(shown, ZeroParamStatus.AVAILABLE)
        hook.remove()

    hook = layer.register_forward_pre_hook(describe_once)


def _places(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Where parameters stand: (module, name, parameter)."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
