"""The parameters that entered 1-bit LAMB together: LAMB while they warm up, then layerwise coefficients that follow a
variance found again from the momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.formulas import AdamSettings, root, track_moments, track_variances
from thinwire.optim.lamb.formulas import LambSettings, Layer, begin_fresh, greatest_growths, trust_ratio
from thinwire.optim.replicated.freeze_group import AdamBucket, Cohort, Members
from thinwire.optim.replicated.synchronizer import Round
from thinwire.zero import Slot

__all__ = ["LambCohort"]


@dataclass
class _Step:
    """The layers of one parameter group on their way to new weights: `updates` are in the payloads' memory."""

    settings: LambSettings
    layers: list[int]
    weights: list[Tensor]
    updates: list[Tensor]


class LambCohort(Cohort):
    """Buckets with one step count and one freeze, as in Cohort; every parameter is a layer with its own coefficient.

    Once frozen, a bucket's momentum and what is exchanged is s times that of Cohort: s = mean RMS / RMS is a constant
    of the layer, so that layers that share a block have one magnitude. `layers`: what is remembered of each parameter.
    `coefficients`: what each one's learning rate was multiplied by in its last step.
    """

    _settings_class = LambSettings

    def __init__(self, *arguments: Any) -> None:
        """See Cohort."""
        super().__init__(*arguments)
        self.layers = {slot.parameter: Layer() for bucket in self.buckets for slot in bucket.layout.slots}
        self.coefficients: dict[int, float] = {}

    def fill(self, bucket: AdamBucket, slot: Slot, gradient: Tensor | None, loss_scale: float | None) -> None:
        """See Cohort; once frozen the gradient is multiplied by the layer's scale, as the momentum is."""
        if self.frozen_at is not None:
            loss_scale = (1.0 if loss_scale is None else loss_scale) / self.layers[slot.parameter].scale
        super().fill(bucket, slot, gradient, loss_scale)

    def name_frozen_state(self) -> None:
        """See Cohort; there is also `exp_avg_sq_fresh`, the fresh variance over the frozen denominator's square."""
        super().name_frozen_state()
        for bucket in self.buckets:
            fresh = torch.empty_like(bucket.second)
            for slot in bucket.layout.slots:
                self._table.state(slot.parameter)["exp_avg_sq_fresh"] = self._view(fresh, slot)

    def own_state(self) -> dict[str, Any]:
        """See Cohort."""
        return {
            "layers": {parameter: asdict(layer) for parameter, layer in self.layers.items()},
            "coefficients": dict(self.coefficients),
        }

    def load_own_state(self, saved: dict[str, Any]) -> None:
        """See Cohort."""
        self.layers = {parameter: Layer(**layer) for parameter, layer in saved["layers"].items()}
        self.coefficients = dict(saved["coefficients"])

    # The warmup: LAMB

    def _warmup_step(self, outcome: Round, loss_scale: float | None) -> None:
        steps = [self._warmup_updates(*group) for group in self._read_gradients(outcome, loss_scale)]
        measures = [torch.stack([_norms(step.weights), _norms(step.updates)]) for step in steps]
        for step, of_layers in zip(steps, self._agree(measures), strict=True):
            for layer, (weight_norm, update_norm) in zip(step.layers, of_layers, strict=True):
                ratio = trust_ratio(weight_norm, update_norm, step.settings)
                if ratio is not None:
                    self.layers[layer].smooth(ratio, step.settings)
                self.coefficients[layer] = 1.0 if ratio is None else ratio
            self._apply(step)

    def _warmup_updates(self, settings: AdamSettings, present: Members, gradients: list[Tensor]) -> _Step:
        """m̂ / (√v̂ + ε) + λw, after the moments took the gradients in."""
        momenta = [self._view(bucket.momentum, slot) for bucket, slot in present]
        variances = [self._view(bucket.second, slot) for bucket, slot in present]
        track_moments(gradients, momenta, variances, settings)
        torch._foreach_copy_(gradients, variances)
        root(gradients, settings, self.steps)
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, momenta)
        torch._foreach_div_(gradients, settings.first_correction(self.steps))
        step = self._step(settings, present, gradients)
        _add_decay(step)
        return step

    # The freeze

    def _freeze(self) -> None:
        super()._freeze()
        for settings, members in self._by_group():
            denominators = [self._view(bucket.second, slot) for bucket, slot in members]
            begin_fresh(self._fresh(members), denominators, settings, self.steps)
        self._unite_scales([(bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots if slot.numel])

    def _unite_scales(self, members: Members) -> None:
        """Give the layers' momenta their mean RMS; one that is zero altogether stays so."""
        if not members:
            return
        momenta = [self._view(bucket.momentum, slot) for bucket, slot in members]
        roots = torch.tensor([slot.numel**0.5 for _, slot in members], device=momenta[0].device)
        magnitudes = [rms for (rms,) in self._agree([(_norms(momenta) / roots)[None]])[0]]
        moving = [rms for rms in magnitudes if rms]
        for (_, slot), momentum, rms in zip(members, momenta, magnitudes, strict=True):
            if rms:
                self.layers[slot.parameter].scale = sum(moving) / len(moving) / rms
                momentum.mul_(self.layers[slot.parameter].scale)

    # The frozen stage

    def _frozen_step(self, unsent: frozenset[int]) -> None:
        self._commit(unsent)
        for bucket in self.buckets:
            self._read_momentum(bucket, bucket.exchange.payload, unsent)
        steps, measures = [], []
        for settings, members in self._by_group():
            self._renew_moments(settings, members)
            moving = [(bucket, slot) for bucket, slot in members if slot.numel and self._trains(slot)]
            if moving:
                steps.append(step := self._frozen_updates(settings, moving))
                measures.append(self._measure_and_decay(step, moving))
        for step, of_layers in zip(steps, self._agree(measures), strict=True):
            for layer, (growth, bare_norm, norm) in zip(step.layers, of_layers, strict=True):
                share = min(1.0, bare_norm / norm) if norm else 1.0
                self.coefficients[layer] = self.layers[layer].follow(growth, share, step.settings)
            self._apply(step)

    def _renew_moments(self, settings: AdamSettings, members: Members) -> None:
        """Take the payloads' new momenta over, and into the fresh variance the gradients that must have led to them."""
        momenta = [self._view(bucket.momentum, slot) for bucket, slot in members]
        new = [self._view(bucket.exchange.payload, slot) for bucket, slot in members]
        gradients = momenta  # g = (m_t - β₁ m_{t-1}) / (1 - β₁), in the old momenta's memory
        torch._foreach_mul_(gradients, -settings.beta1)
        torch._foreach_add_(gradients, new)
        torch._foreach_div_(gradients, [(1 - settings.beta1) * scale for scale in self._scales(members)])
        if self._compressed == "momentum":
            torch._foreach_div_(gradients, [self._view(bucket.second, slot) for bucket, slot in members])
        track_variances(gradients, self._fresh(members), settings)
        torch._foreach_copy_(momenta, new)

    def _frozen_updates(self, settings: AdamSettings, members: Members) -> _Step:
        """m̂ / (√v̂ + ε) with v frozen."""
        updates = [self._view(bucket.exchange.payload, slot) for bucket, slot in members]
        correction = settings.first_correction(self.steps)
        torch._foreach_div_(updates, [scale * correction for scale in self._scales(members)])
        if self._compressed == "momentum":
            torch._foreach_div_(updates, [self._view(bucket.second, slot) for bucket, slot in members])
        return self._step(settings, members, updates)

    def _measure_and_decay(self, step: _Step, members: Members) -> Tensor:
        """Add λw, and return [3, layers]: how far the fresh variance fell, the updates' norms before λw and after."""
        denominators = [self._view(bucket.second, slot) for bucket, slot in members]
        growths = greatest_growths(self._fresh(members), denominators, step.settings, self.steps)
        bare_norms = _norms(step.updates)
        _add_decay(step)
        return torch.stack([growths, bare_norms, _norms(step.updates)])

    def _fresh(self, members: Members) -> list[Tensor]:
        return [self._table.state(slot.parameter)["exp_avg_sq_fresh"] for _, slot in members]

    def _scales(self, members: Members) -> list[float]:
        return [self.layers[slot.parameter].scale for _, slot in members]

    # Both

    def _step(self, settings: AdamSettings, members: Members, updates: list[Tensor]) -> _Step:
        assert isinstance(settings, LambSettings)
        layers = [slot.parameter for _, slot in members]
        return _Step(settings, layers, [self._table.weight(layer) for layer in layers], updates)

    def _apply(self, step: _Step) -> None:
        """w -= lr · coefficient · update; spends the updates."""
        torch._foreach_mul_(step.updates, [-step.settings.lr * self.coefficients[layer] for layer in step.layers])
        torch._foreach_add_(step.weights, step.updates)
        for layer in step.layers:
            self._table.publish(layer)

    def _agree(self, measures: Sequence[Tensor]) -> list[list[list[float]]]:
        """Rank 0's `measures`, [kinds, layers] for each group, as lists [layers, kinds]; collective.

        Norms are sums, which another CPU or number of threads adds up in another order: weights that must be the same
        bits on every rank cannot depend on each rank's own.
        """
        if not measures:
            return []
        together = torch.cat([measured.t() for measured in measures]).double().contiguous()
        self._comm.broadcast(together)
        groups = torch.split(together.cpu(), [measured.shape[1] for measured in measures])
        return [of_layers.tolist() for of_layers in groups]

    def _trains(self, slot: Slot) -> bool:
        return self._table.parameters[slot.parameter].requires_grad


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norms, fp32 [tensors]."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def _add_decay(step: _Step) -> None:
    if step.settings.weight_decay:
        torch._foreach_add_(step.updates, step.weights, alpha=step.settings.weight_decay)
