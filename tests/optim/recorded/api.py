"""How a form's optimizer is built, saved and loaded: all that the recorded runs know of the library's surface."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from tests.optim.recorded.forms import Form
from tests.zero.saved import Saved, save
from thinwire.comm import Communicator

__all__ = ["build", "frozen_at", "load_ranks", "save_rank"]


def build(form: Form, model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Any:
    """The optimizer of `form` on `groups` of the parameters of `model`."""
    options = form.all_options | {"stage": form.stage, "comm": comm}
    if _is_sharded(form):
        options["named_parameters"] = model.named_parameters()
    if hasattr(thinwire, form.optimizer):
        return getattr(thinwire, form.optimizer)(groups, **options)
    return thinwire.ShardedOptimizer(groups, getattr(torch.optim, form.optimizer), **options)


def save_rank(form: Form, model: nn.Module, optimizer: Any) -> Any:
    """What this rank saves of the model and its optimizer."""
    if _is_sharded(form):
        return save(optimizer.comm, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def load_ranks(form: Form, model: nn.Module, optimizer: Any, saved: list[Any]) -> None:
    """Take over what `save_rank` gave on every rank."""
    if _is_sharded(form):
        optimizer.load(_Saved(*map(list, zip(*saved, strict=True))))
        return
    state = torch.load(io.BytesIO(saved[optimizer.comm.rank]), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def frozen_at(optimizer: Any) -> int | None:
    """The step after which the variance froze; None before, or where nothing freezes."""
    step: int | None = getattr(optimizer, "frozen_at", None)
    return step


def _is_sharded(form: Form) -> bool:
    """Whether its state is laid out as ShardedOptimizer's is, even at that one's stage 0."""
    return form.stage > 0 or not hasattr(thinwire, form.optimizer)


class _Saved(Saved):
    """Knows as the engine's checkpoints do that of an empty parameter nobody saves a slice."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        return super().read(kind, name, start, numel) if numel or kind != "weight" else torch.empty(0)
