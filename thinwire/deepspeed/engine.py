"""The engine by DeepSpeed's names, which refuses what DeepSpeed's asserts against."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from thinwire.deepspeed.errors import NotOfferedError
from thinwire.deepspeed.logs import logger
from thinwire.engine import Engine
from thinwire.engine.checkpoint.manifest import rank_file
from thinwire.engine.errors import CallError

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(Engine):
    """thinwire's engine, which refuses what DeepSpeed's asserts against, and has the methods that scripts override."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the engine's, at stages 0 and 1 and not nested.

        Raises CallError, an AssertionError, inside itself, and from stage 2 on, where every backward's gradients leave.
        """
        stage = self.zero_optimization_stage()
        if stage > 1:
            raise CallError(
                f"no_sync context manager is incompatible with gradients that are sharded, at ZeRO stage {stage}: "
                "leave it out, as gradient_accumulation_steps adds up without it, or use stage 0 or 1"
            )
        if self._accumulation.inside_no_sync:
            raise CallError("no_sync context manager reentry is unsupported: leave the inner one out")
        with super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards inside, and one reduction of their sum when it is left; step() comes after it.

        At stages 2 and 3 gradients leave with every backward, and add up in their owners' shards. Raises
        NotOfferedError, a NotImplementedError, at stage 0, CallError, an AssertionError, inside itself or no_sync().
        """
        if not self.zero_optimization_stage():
            raise NotOfferedError(
                "coalesce_grad_reduction requires ZeRO stage 1, 2 or 3, and this engine is at stage 0: call the "
                "backwards but the last inside no_sync()"
            )
        if self._accumulation.inside_no_sync:
            raise CallError("coalesce_grad_reduction cannot be nested inside another no_sync context: leave one out")
        with super().no_sync():
            yield
        self._accumulation.end_backward()
        self._optimizer.end_backward()

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """At stage 3, what save_16bit_model writes, on rank 0's CPU; None on other ranks. Collective.

        Raises ValueError at other stages, as DeepSpeed does.
        """
        if not self.zero_optimization_partition_weights():
            raise ValueError(
                "_zero3_consolidated_16bit_state_dict() is for stage 3, and this engine is at stage "
                f"{self.zero_optimization_stage()}: engine.whole_state_dict() has the weights at every stage"
            )
        return self._checkpoints.weights_in_16_bits(exclude_frozen_parameters)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Where this rank's part of a checkpoint lies, weights and optimizer state in one file."""
        return os.path.join(checkpoints_path, str(tag), rank_file(self.global_rank))

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Let a script that was copied beside checkpoints be run; where the file system has no such thing, say so."""
        try:
            path = Path(dst)
            path.chmod(path.stat().st_mode | 0o100)
        except OSError as error:
            logger.info("%s cannot be made executable: %s", dst, error)
