"""The layers of a model by `torch.compile`, whatever the lengths, and what that took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch._guards import CompileContext, TracingContext
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler


@dataclass
class Compilation:
    """What compiling a model's layers has taken so far.

    Attributes:
        graphs: compiled; equal layers share theirs.
        recompiles: of them, those for inputs that an earlier one did not fit.
        guards: checks that all of them have before they run.
    """

    graphs: int = 0
    recompiles: int = 0
    guards: int = 0

    def _count(self) -> None:
        current = CompileContext.current_compile_id()
        self.graphs += 1
        self.recompiles += current is not None and bool(current.frame_compile_id)
        context = TracingContext.try_get()
        self.guards += 0 if context is None else len(list(context.guards_context.dynamo_guards))


def compile_layers(model: nn.Module) -> Compilation:
    """Have every layer, each what a ModuleList holds, or `model` where it has none, compiled at its first calls.

    Their attention stays outside of graphs: it is called by document, or with a cache, whose sizes would be compiled
    in. Raises RuntimeError without a C++ compiler on CPUs.
    """
    if all(one.device.type == "cpu" for one in model.parameters()):
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise RuntimeError(
                "compile=True on a CPU needs a C++ compiler, and none was found: install g++, name one in CXX, or "
                "leave compile out"
            ) from error
    report, inductor = Compilation(), lookup_backend("inductor")

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        report._count()
        return inductor(graph, inputs)

    for layer in list(_layers(model)) or [model]:
        for part in layer.modules():
            if part is not layer and hasattr(part, "layer_idx"):  # as transformers number what has a cache
                part.forward = _Eager(part)
        layer.compile(backend=backend, dynamic=True)
    return report


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


class _Eager:
    """The forward of a module, in no graph. An object, so that a copied model calls what it has itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *given: Any, **named: Any) -> Any:
        return type(self._module).forward(self._module, *given, **named)
