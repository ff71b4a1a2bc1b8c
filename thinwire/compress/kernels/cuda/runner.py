"""Launches on their way to a GPU: compiled once a device, on torch's current stream."""

from __future__ import annotations

from typing import Any

import torch

from thinwire.compress.kernels.cuda.launch import Launch, architecture_option, compile_options, source_text
from thinwire.compress.kernels.cuda.toolkit import Toolkit, machine_code

__all__ = ["Runner"]


class Runner:
    """Runs launches through one toolkit, and keeps what it compiled."""

    def __init__(self, toolkit: Toolkit) -> None:
        self._toolkit = toolkit
        self._kernels: dict[tuple[str, str, int, int, int], Any] = {}

    def run(self, launch: Launch, device: torch.device) -> None:
        """Launch on `device`, a CUDA device, whatever device is current; nothing where there is nothing to do."""
        if 0 in launch.grid:
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        key = (launch.source, launch.function, launch.block_size, launch.threads, index)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._load(launch, index)
        stream = torch.cuda.current_stream(index).cuda_stream
        self._toolkit.launch(kernel, launch.grid, launch.threads, launch.arguments, index, stream)

    def _load(self, launch: Launch, device: int) -> Any:
        """A kernel on a device: a loaded module belongs to one."""
        architecture = architecture_option(torch.cuda.get_device_capability(device), self._toolkit.architectures)
        options = (*compile_options(launch.block_size, launch.threads), architecture)
        code = machine_code(self._toolkit, source_text(launch.source), options)
        return self._toolkit.load(code, launch.function, device)
