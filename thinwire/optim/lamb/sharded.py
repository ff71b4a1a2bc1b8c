"""1-bit LAMB on sharded state: layerwise coefficients for large batches, one bit an element, and ZeRO's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm import Communicator
from thinwire.compress.codecs import DEFAULT_BLOCK_SIZE
from thinwire.optim.lamb.formulas import LambSettings, Layer, check_lamb_options, trust_ratio
from thinwire.optim.lamb.master_weights import LambMasters, LambMoments, square_norms
from thinwire.optim.sharded.layerwise_bucket import FrozenLambBucket
from thinwire.optim.sharded.packed_bucket import FrozenBucket
from thinwire.optim.sharded.packed_optimizer import ShardedOneBitOptimizer
from thinwire.optim.sharded.packing import FrozenState
from thinwire.zero import LARGEST_BUCKET_BYTES, Piece, PieceSource
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.master_weights import BucketMasters

__all__ = ["ShardedOneBitLamb"]


class ShardedOneBitLamb(ShardedOneBitOptimizer):
    """LAMB that sends one bit an element: 1-bit LAMB (Li et al. 2021, arXiv 2104.06069) on ZeRO stage 0 or 1.

    OneBitLamb's algorithm with `compress="update"` on the state of ShardedOneBitAdam. Layers are cut where shards are:
    each owner adds up what of a layer's norms is in its shard, and one all-reduce of two fp64 numbers a layer, once
    frozen with one of the largest √v / √v', gives every rank the coefficients. Bytes an element of a 16-bit model once
    frozen: weights 2, worker residual 2, preconditioner 1, momentum 1/8, and (master 4 + owner residual 4 + fresh
    variance 4) / ranks; `max_norm` and fp16 training add 2, for the residual before the step.

    Args:
        params, lr, betas, eps, stage, comm, named_parameters, param_dtype, bucket_bytes, max_norm, offload, pin_memory,
            block_size, resync_interval, on_drift, reversible: as in ShardedOneBitAdam. At stage 2 gradients would be
            sharded too, which the frozen stage has no whole ones of: it is refused.
        freeze_step, weight_decay, bias_correction, max_coeff, min_coeff, coeff_beta, factor_max, factor_min,
            factor_threshold: as in OneBitLamb.

    A step that is not finite on any rank is skipped on all of them: see `last_step`. Raises ValueError or TypeError, on
    every rank, for parameters or options that cannot work.
    """

    _masters_class = LambMasters

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        freeze_step: int | Literal["auto"] = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        stage: int = 1,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        param_dtype: torch.dtype | None = None,
        bucket_bytes: int = LARGEST_BUCKET_BYTES,
        max_norm: float = 0.0,
        offload: bool = False,
        pin_memory: bool = True,
        block_size: int = DEFAULT_BLOCK_SIZE,
        resync_interval: int = 100,
        on_drift: Literal["repair", "raise"] = "repair",
        reversible: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            LambMoments,
            freeze_step=freeze_step,
            stage=stage,
            comm=comm,
            named_parameters=named_parameters,
            param_dtype=param_dtype,
            bucket_bytes=bucket_bytes,
            max_norm=max_norm,
            offload=offload,
            pin_memory=pin_memory,
            block_size=block_size,
            resync_interval=resync_interval,
            on_drift=on_drift,
            reversible=reversible,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            coeff_beta=coeff_beta,
            factor_max=factor_max,
            factor_min=factor_min,
            factor_threshold=factor_threshold,
        )
        self._layers = [Layer() for _ in self._placement.parameters]
        self._coefficients: dict[int, float] = {}

    def get_lamb_coeffs(self) -> list[float]:
        """What each parameter's learning rate was multiplied by in its last step, in the order of the groups; 1 for a
        parameter that has not stepped. The method's name is DeepSpeed's."""
        return [self._coefficients.get(number, 1.0) for number in range(len(self._layers))]

    # Checkpoints

    def pieces(self) -> list[Piece]:
        """See ShardedOneBitAdam; once frozen the fresh variance is among them."""
        fresh = [piece for bucket in self._frozen_lamb() for piece in bucket.pieces(self._placement.names)]
        return super().pieces() + fresh

    def counters(self) -> dict[str, Any]:
        """See ShardedOneBitAdam; and what is remembered of each layer."""
        names = self._placement.names
        layers = {name: asdict(layer) for name, layer in zip(names, self._layers, strict=True)}
        coefficients = {names[number]: value for number, value in self._coefficients.items()}
        return super().counters() | {"lamb": {"layers": layers, "coefficients": coefficients}}

    @torch.no_grad()
    def load(self, source: PieceSource) -> None:
        """See ShardedOneBitAdam. Collective."""
        super().load(source)
        saved = source.counters()["lamb"]
        names = self._placement.names
        self._layers[:] = [Layer(**saved["layers"][name]) for name in names]
        self._coefficients.clear()
        self._coefficients |= {
            number: saved["coefficients"][name] for number, name in enumerate(names) if name in saved["coefficients"]
        }
        for bucket in self._frozen_lamb():
            bucket.load(source, names)

    def reset_state(self) -> None:
        """Forget moments, residuals, coefficients and the freeze: the warmup begins anew."""
        super().reset_state()
        self._layers[:] = [Layer() for _ in self._layers]
        self._coefficients.clear()

    # One step

    def _warmup_step(self, norm: float, absent: frozenset[int]) -> None:
        coefficient = self._clip(norm) / self.loss_scale
        squares = self._zeros(2)
        for masters, gradients in zip(self._lamb_masters(), self._gradients, strict=True):
            masters.begin_step(self.steps + 1)
            if gradients.filled:
                masters.find_updates(gradients.average, coefficient, absent)
                masters.measure(squares)
        self._exchange_comm.all_reduce(squares)
        for number, (weight, update) in enumerate(squares.sqrt().tolist()):
            if number not in absent:
                settings = self._group_settings(number)
                ratio = trust_ratio(weight, update, settings)
                if ratio is not None:
                    self._layers[number].smooth(ratio, settings)
                self._coefficients[number] = 1.0 if ratio is None else ratio
        self._move_and_publish(self._move_by_coefficients)

    def _move_by_coefficients(self, masters: BucketMasters, average: Tensor) -> None:
        del average  # the update is in its place
        assert isinstance(masters, LambMasters)
        masters.move(lambda number: self._group_settings(number).lr * self._coefficients[number])

    def _scale_momenta(self, momenta: Sequence[Tensor]) -> None:
        """Give the layers' u their mean RMS; one that is zero altogether stays so."""
        squares = self._zeros()
        parts = [
            (run.parameter, u[run.place])
            for bucket, u in zip(self._buckets, momenta, strict=True)
            for run in bucket.own_runs
        ]
        if parts:
            squares[[number for number, _ in parts]] += square_norms([part for _, part in parts])
        self._exchange_comm.all_reduce(squares)
        sizes = [max(1, parameter.numel()) for parameter in self._placement.parameters]
        magnitudes = [math.sqrt(square / size) for square, size in zip(squares.tolist(), sizes, strict=True)]
        moving = [rms for rms in magnitudes if rms]
        for layer, rms in zip(self._layers, magnitudes, strict=True):
            layer.scale = sum(moving) / len(moving) / rms if rms else 1.0
        for number, part in parts:
            part.mul_(self._layers[number].scale)

    def _take_over(self) -> None:
        squares, growths = self._zeros(2), self._zeros()
        for bucket in self._frozen_lamb():
            bucket.take_over_and_measure(squares, growths)
        adding = self._exchange_comm.all_reduce(squares, async_op=True)
        self._exchange_comm.all_reduce(growths, "max")
        adding.wait()
        measures = zip(growths.tolist(), squares.sqrt().tolist(), strict=True)
        for number, (growth, (bare_norm, norm)) in enumerate(measures):
            share = min(1.0, bare_norm / norm) if norm else 1.0
            settings = self._group_settings(number)
            self._coefficients[number] = self._layers[number].follow(growth, share, settings)

    # Parts

    def _zeros(self, *shape: int) -> Tensor:
        """Numbers to add up over the ranks: fp64 [parameters, ...]."""
        return torch.zeros(len(self._layers), *shape, dtype=torch.float64, device=self._buckets[0].flat.device)

    def _lamb_masters(self) -> list[LambMasters]:
        return [masters for masters in self._masters if isinstance(masters, LambMasters)]

    def _frozen_lamb(self) -> list[FrozenLambBucket]:
        return [bucket for bucket in self._frozen if isinstance(bucket, FrozenLambBucket)]

    def _make_frozen_bucket(
        self, bucket: FlatBucket, masters: BucketMasters, state: FrozenState, reversible: bool
    ) -> FrozenBucket:
        return FrozenLambBucket(
            bucket,
            masters,
            self._exchange_comm,
            self._codec,
            self._settings,
            state,
            reversible=reversible,
            layers=self._layers,
            coefficients=self._coefficients,
        )

    def _group_settings(self, number: int) -> LambSettings:
        return LambSettings.of_group(self.param_groups[self._placement.group_of[number]])

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_lamb_options(group)

    def _check_options(self, **settings: Any) -> None:
        super()._check_options(**settings)
        if settings["stage"] == 2:
            raise ValueError(
                "1-bit LAMB has stages 0 and 1, not 2: once frozen a gradient lives only while its bucket is in "
                "flight, at every stage, so that there is none to shard. Use stage 1"
            )
