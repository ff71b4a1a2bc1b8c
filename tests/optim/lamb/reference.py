"""1-bit LAMB in float64, all workers in one process: what OneBitLamb is compared with. Written for reading."""

import numpy as np

from tests.optim.adam.reference import ReferenceExchange


class ReferenceOneBitLamb:
    """1-bit LAMB on weights given as a list of layers, fused into one exchange in this order.

    LAMB for `freeze_step` steps; then variance and coefficients stay. What is compressed is the paper's momentum, or
    the update: the momentum divided by √v + ε.
    """

    def __init__(
        self,
        weights,
        world_size,
        *,
        freeze_step,
        block_size,
        compress="update",
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        bias_correction=True,
        max_coeff=10.0,
        min_coeff=0.01,
        coeff_beta=0.9,
        factor_max=4.0,
        factor_min=0.5,
        factor_threshold=0.1,
    ) -> None:
        self.weights = [np.array(layer, dtype=np.float64) for layer in weights]
        self.freeze_step, self.compress, self.lr = freeze_step, compress, lr
        self.betas, self.eps, self.weight_decay, self.bias_correction = betas, eps, weight_decay, bias_correction
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self.momentum = [np.zeros_like(layer) for layer in self.weights]
        self.variance = [np.zeros_like(layer) for layer in self.weights]
        self.ratios = [[] for _ in self.weights]  # every trust ratio of the warmup
        self.factors = [1.0 for _ in self.weights]
        self.exchange = ReferenceExchange(sum(layer.size for layer in self.weights), world_size, block_size)
        self.step_count = 0

    def step(self, gradients) -> list[float]:
        """One step on gradients [layer][world_size, numel]; the coefficients of the layers."""
        self.step_count += 1
        if self.step_count <= self.freeze_step:
            return self._lamb_step(gradients)
        if self.step_count == self.freeze_step + 1:
            self._freeze()
        return self._frozen_step(gradients)

    def _lamb_step(self, gradients) -> list[float]:
        beta1, beta2 = self.betas
        coefficients = []
        for number, workers in enumerate(gradients):
            mean = workers.mean(axis=0)
            self.momentum[number] = beta1 * self.momentum[number] + (1 - beta1) * mean
            self.variance[number] = beta2 * self.variance[number] + (1 - beta2) * mean**2
            update = self._momentum_hat(number) / self._denominator(self.variance[number])
            update += self.weight_decay * self.weights[number]
            coefficient = 1.0
            if np.linalg.norm(self.weights[number]) > 0 and np.linalg.norm(update) > 0:
                ratio = np.linalg.norm(self.weights[number]) / np.linalg.norm(update)
                coefficient = np.clip(ratio, self.min_coeff, self.max_coeff)
                self.ratios[number].append(coefficient)
            self.weights[number] -= self.lr * coefficient * update
            coefficients.append(coefficient)
        return coefficients

    def _freeze(self) -> None:
        self.step_count -= 1  # the frozen variance is corrected for the warmup's steps
        self.frozen = [self._denominator(variance) for variance in self.variance]
        self.step_count += 1
        if self.compress == "update":
            self.frozen = [
                np.maximum(one, 0.01 * one[v > 0].mean()) if (v > 0).any() else one
                for one, v in zip(self.frozen, self.variance, strict=True)
            ]
        self.coefficients = [self._average(ratios) for ratios in self.ratios]
        self.alive = [variance > 0 for variance in self.variance]
        self.sent = self.frozen if self.compress == "update" else [np.ones_like(one) for one in self.frozen]
        rms = [np.sqrt(np.mean((m / d) ** 2)) for m, d in zip(self.momentum, self.sent, strict=True)]
        united = np.mean([one for one in rms if one > 0])
        self.sent = [d * (one / united if one > 0 else 1.0) for d, one in zip(self.sent, rms, strict=True)]
        # The fresh variance begins as the one that the frozen denominators stand for.
        correction = 1 - self.betas[1] ** self.freeze_step if self.bias_correction else 1.0
        self.variance = [(denominator - self.eps) ** 2 * correction for denominator in self.frozen]

    def _average(self, ratios) -> float:
        """The moving average with decay `coeff_beta`, its weights made to add up to 1."""
        if not ratios:
            return 1.0
        weights = self.coeff_beta ** np.arange(len(ratios))[::-1]
        return float(weights @ ratios / weights.sum())

    def _frozen_step(self, gradients) -> list[float]:
        beta1, beta2 = self.betas
        before = self.momentum
        payloads = [
            (beta1 * momentum + (1 - beta1) * workers) / divisor
            for divisor, momentum, workers in zip(self.sent, before, gradients, strict=True)
        ]
        fused = self.exchange(np.concatenate(payloads, axis=1))
        pieces = np.split(fused, np.cumsum([layer.size for layer in self.weights])[:-1])
        self.momentum = [
            np.where(alive, piece * divisor, 0.0)
            for piece, divisor, alive in zip(pieces, self.sent, self.alive, strict=True)
        ]
        coefficients = []
        for number, alive in enumerate(self.alive):
            gradient = (self.momentum[number] - beta1 * before[number]) / (1 - beta1)
            self.variance[number] = beta2 * self.variance[number] + (1 - beta2) * gradient**2
            without_decay = np.where(alive, self._momentum_hat(number) / self.frozen[number], 0.0)
            update = without_decay + self.weight_decay * self.weights[number]
            growths = np.where(alive, self.frozen[number] / self._denominator(self.variance[number]), 0.0)
            share = 1.0
            if np.linalg.norm(update) > 0:
                share = min(1.0, np.linalg.norm(without_decay) / np.linalg.norm(update))
            factor = np.clip(growths.max() * share + 1 - share, self.factor_min, self.factor_max)
            last = self.factors[number]
            factor = np.clip(factor, last * (1 - self.factor_threshold), last * (1 + self.factor_threshold))
            self.factors[number] = factor
            self.weights[number] -= self.lr * self.coefficients[number] * factor * update
            coefficients.append(self.coefficients[number] * factor)
        return coefficients

    def _momentum_hat(self, number):
        return self.momentum[number] / (1 - self.betas[0] ** self.step_count if self.bias_correction else 1.0)

    def _denominator(self, variance):
        return np.sqrt(variance / (1 - self.betas[1] ** self.step_count if self.bias_correction else 1.0)) + self.eps


SIZES = (7, 130, 64, 1, 99)


def layers_and_gradients(world_size, steps, seed):
    """Layers of very different magnitude, and gradients [step][layer][world_size, numel] to match."""
    rng = np.random.default_rng(seed)
    start = [rng.standard_normal(size).astype(np.float32) * 10.0**-number for number, size in enumerate(SIZES)]
    magnitudes = 10.0 ** -rng.uniform(0, 4, len(SIZES))
    gradients = [
        [
            (magnitude * (rng.standard_normal((world_size, size)) + 0.3)).astype(np.float32)
            for size, magnitude in zip(SIZES, magnitudes, strict=True)
        ]
        for _ in range(steps)
    ]
    return start, gradients
