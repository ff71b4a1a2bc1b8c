"""deepspeed.ops' builders and what was built: thinwire compiles its kernels when they are first used, so that a builder
only says what there is."""

from __future__ import annotations

import torch

__all__ = [
    "AsyncIOBuilder",
    "CPUAdamBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "OpBuilder",
    "SparseAttnBuilder",
    "compatible_ops",
    "git_branch",
    "git_hash",
    "installed_ops",
    "torch_info",
]

git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
compatible_ops = {"fused_adam": True, "cpu_adam": True, "fused_lamb": True, "sparse_attn": True, "async_io": False}

torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}


class OpBuilder:
    """The name of an operation, and whether it works here, which it does."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Always."""
        return True

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(0, 0): thinwire does not build for ROCm."""
        return 0, 0


class FusedAdamBuilder(OpBuilder):
    """Adam."""

    NAME = "fused_adam"


class CPUAdamBuilder(OpBuilder):
    """Adam, of state on the host."""

    NAME = "cpu_adam"


class FusedLambBuilder(OpBuilder):
    """LAMB."""

    NAME = "fused_lamb"


class SparseAttnBuilder(OpBuilder):
    """Block-sparse attention."""

    NAME = "sparse_attn"


class AsyncIOBuilder(OpBuilder):
    """Asynchronous files, for swapping to NVMe, which thinwire does not do."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Never."""
        return False
