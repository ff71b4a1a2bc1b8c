"""What was built: thinwire compiles its kernels when they are first used, so that nothing has been."""

from __future__ import annotations

import torch

from thinwire.version import __version__ as version

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
compatible_ops = {"fused_adam": True, "cpu_adam": True, "fused_lamb": True, "sparse_attn": True, "async_io": False}

torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}
