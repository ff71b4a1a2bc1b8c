"""Algorithm 1 of 1-bit Adam in float64, all workers in one process: what every backend is compared with.
Written for reading, not for speed; scales are rounded to fp32, as the wire states."""

import numpy as np
import torch

from thinwire.optim.storage import quantize, table


def sign1(values: np.ndarray, block_size: int) -> np.ndarray:
    """C(x): in each block the signs, times the mean magnitude."""
    out = np.empty_like(values)
    for start in range(0, len(values), block_size):
        block = values[start : start + block_size]
        scale = float(np.float32(np.abs(block).mean()))
        out[start : start + block_size] = np.where(block >= 0, scale, -scale)
    return out


class ReferenceExchange:
    """Both legs of the exchange, with residuals, for `world_size` workers of `numel` elements each."""

    def __init__(self, numel: int, world_size: int, block_size: int) -> None:
        blocks = -(-numel // block_size)
        self.shard = max(1, -(-blocks // world_size)) * block_size
        self.numel, self.world_size, self.block_size = numel, world_size, block_size
        self.worker_residuals = np.zeros((world_size, numel))
        self.owner_residual = np.zeros(numel)  # each owner's part, side by side
        self.closest_call = np.inf  # the smallest value whose sign was taken, as a part of its block's scale

    def __call__(self, payloads: np.ndarray) -> np.ndarray:
        """The compressed average of payloads [world_size, numel]."""
        compensated = payloads + self.worker_residuals
        sent = np.stack([self._compress_by_shard(vector) for vector in compensated])
        self.worker_residuals = compensated - sent
        average = sent.mean(axis=0) + self.owner_residual
        out = self._compress_by_shard(average)
        self.owner_residual = average - out
        return out

    def _compress_by_shard(self, vector: np.ndarray) -> np.ndarray:
        # Blocks never straddle shards, as a shard is whole blocks.
        out = sign1(vector, self.block_size)
        self.closest_call = min(self.closest_call, float((np.abs(vector) / np.abs(out)).min()))
        return out


class ReferenceOneBitAdam:
    """1-bit Adam on one flat weight vector: plain Adam for `freeze_step` steps, then frozen variance.

    What is compressed is the paper's momentum, or the update: the momentum divided by √v + ε. With `packs`, as sharded
    state does, 1 / (√v + ε) is rounded to 8 bits at the freeze, and the update to what one leg would bring.
    """

    def __init__(
        self, weights, world_size, *, lr, freeze_step, block_size, compress, packs=False, betas=(0.9, 0.999), eps=1e-8
    ) -> None:
        self.compress, self.packs = compress, packs
        self.weights = np.array(weights, dtype=np.float64)
        self.lr, self.freeze_step, self.betas, self.eps = lr, freeze_step, betas, eps
        self.momentum = np.zeros_like(self.weights)
        self.variance = np.zeros_like(self.weights)
        self.exchange = ReferenceExchange(len(self.weights), world_size, block_size)
        self.step_count = 0

    def step(self, gradients: np.ndarray) -> None:
        """One step on gradients [world_size, numel]."""
        self.step_count += 1
        beta1, beta2 = self.betas
        if self.step_count <= self.freeze_step:
            mean = gradients.mean(axis=0)
            self.momentum = beta1 * self.momentum + (1 - beta1) * mean
            self.variance = beta2 * self.variance + (1 - beta2) * mean**2
        corrected = self.variance / (1 - beta2 ** min(self.step_count, self.freeze_step))
        denominator = np.sqrt(corrected) + self.eps
        if self.step_count > self.freeze_step:
            if self.compress == "update":
                denominator = np.maximum(denominator, 0.01 * denominator[self.variance > 0].mean())
            if self.packs:
                denominator = self._pack(denominator)
            scale = denominator if self.compress == "update" else 1.0
            self.momentum = scale * self.exchange((beta1 * self.momentum + (1 - beta1) * gradients) / scale)
        update = self.momentum / (1 - beta1**self.step_count) / denominator
        self.weights -= self.lr * np.where(self.variance > 0, update, 0.0)

    def _pack(self, denominator: np.ndarray) -> np.ndarray:
        """The denominators that 8 bits say; right after the freeze the momentum goes through the owners' codec."""
        moving = self.variance > 0
        inverse = torch.from_numpy(np.where(moving, 1 / denominator, 0.0)).float()
        low, high = inverse[moving].min(), inverse[moving].max()
        rounded = table(low[None], high[None])[0][quantize(inverse, float(low), float(high)).int()].double().numpy()
        if self.step_count == self.freeze_step + 1:
            u = self.momentum * rounded
            packed = np.where(moving, sign1(u, self.exchange.block_size), 0.0)
            self.exchange.owner_residual = np.where(moving, u - packed, 0.0)
            self.momentum = np.divide(packed, rounded, out=np.zeros_like(packed), where=moving)
        return np.divide(1.0, rounded, out=denominator, where=moving)
