"""0/1 Adam in float64, all workers in one process: what the optimizer is compared with. Written for reading."""

import numpy as np

import thinwire
from tests.optim.adam.reference import ReferenceExchange


class ReferenceZeroOneAdam:
    """Algorithm 1 of 0/1 Adam (arXiv 2202.06009) on one flat weight vector, in the two phases of DeepSpeed.

    `weights` [workers, numel]: every worker's own. What is compressed is the paper's momentum (while the variance
    moves, the gradient), or the update: the momentum divided by √v + ε and bounded, in both phases. A sync sends
    u / Σγ rather than u, so that residuals are momenta.
    """

    def __init__(
        self, weights, world_size, *, lr, var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper,
        block_size, compress, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    ) -> None:  # fmt: skip
        self.weights = np.tile(np.asarray(weights, dtype=np.float64), (world_size, 1))
        self.lr, self.betas, self.eps, self.weight_decay, self.compress = lr, betas, eps, weight_decay, compress
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self.momenta = np.zeros_like(self.weights)
        self.variance = np.zeros(self.weights.shape[1])
        self.new_exchange = lambda: ReferenceExchange(self.weights.shape[1], world_size, block_size)
        self.exchange = self.new_exchange()
        self.moved, self.rates = np.zeros_like(self.weights), 0.0  # u and Σγ
        self.step_count = self.var_counter = self.var_updates = self.local_counter = 0
        self.var_interval = self.local_interval = 1
        self.kinds = ""  # a letter for each step so far: exact, compressed, local, sync

    def step(self, gradients: np.ndarray) -> None:
        """One step on gradients [world_size, numel]."""
        self.step_count += 1
        if self.step_count <= self.var_freeze_step:
            self.first_phase(gradients)
            if self.step_count == self.var_freeze_step:
                self.exchange = self.new_exchange()
        else:
            self.second_phase(gradients)

    def first_phase(self, gradients: np.ndarray) -> None:
        beta1, beta2 = self.betas
        if self.step_count % self.var_interval == 0:
            self.kinds += "e"
            self.variance = beta2 * self.variance + (1 - beta2) * gradients.mean(axis=0) ** 2
            self.var_updates += 1
            self.var_counter += 1
            if self.var_counter == self.var_update_scaler:
                self.var_counter = 0
                self.var_interval *= 2
        else:
            self.kinds += "c"
        if self.kinds[-1] == "c" and self.compress == "update":
            momenta = beta1 * self.momenta + (1 - beta1) * gradients
            self.momenta[:] = self.denominator() * self.exchange(self.bounded(momenta / self.denominator()))
        else:
            mean = self.exchange(gradients) if self.kinds[-1] == "c" else gradients.mean(axis=0)
            self.momenta = beta1 * self.momenta + (1 - beta1) * mean
        self.weights *= 1 - self.lr * self.weight_decay
        self.weights -= self.rate() * self.momenta / self.denominator()

    def second_phase(self, gradients: np.ndarray) -> None:
        beta1, _ = self.betas
        decay = 1 - self.lr * self.weight_decay
        self.momenta = beta1 * self.momenta + (1 - beta1) * gradients
        if self.compress == "update":
            self.momenta = self.denominator() * self.bounded(self.momenta / self.denominator())
        step = -self.rate() * self.momenta / self.denominator()
        self.weights = decay * self.weights + step
        self.moved = decay * self.moved + step
        self.rates = decay * self.rates + self.rate()
        if self.step_count % self.local_interval == 0:
            self.kinds += "s"
            self.weights -= self.moved
            average = self.exchange(-self.moved / self.rates * self.denominator() / self.scale()) * self.scale()
            self.momenta[:] = average
            self.weights -= self.rates * average / self.denominator()
            self.moved, self.rates = np.zeros_like(self.weights), 0.0
        else:
            self.kinds += "l"
        self.local_counter += 1
        if self.local_counter == self.local_step_scaler:
            self.local_counter = 0
            self.local_interval = min(self.local_step_clipper, 2 * self.local_interval)

    def rate(self) -> float:
        return self.lr / (1 - self.betas[0] ** self.step_count)

    def bounded(self, updates: np.ndarray) -> np.ndarray:
        beta1, beta2 = self.betas
        bound = np.sqrt(len(self.weights)) * max(1.0, (1 - beta1) / np.sqrt(1 - beta2))
        return np.clip(updates, -bound, bound)

    def scale(self) -> np.ndarray | float:
        return self.denominator() if self.compress == "update" else 1.0

    def denominator(self) -> np.ndarray:
        root = np.sqrt(self.variance / (1 - self.betas[1] ** self.var_updates)) + self.eps
        return np.maximum(root, 0.01 * root.mean()) if self.compress == "update" else root


SCHEDULE = {"var_freeze_step": 25, "var_update_scaler": 5, "local_step_scaler": 12, "local_step_clipper": 5}
"""Exact steps, then every 2nd and 4th; after the freeze, intervals of 1, 2, 4 and 5 steps."""


def make_zero_one(model, comm, **options) -> thinwire.ZeroOneAdam:
    options = {"lr": 3e-3, "block_size": 64} | SCHEDULE | options
    return thinwire.ZeroOneAdam(model.parameters(), comm=comm, **options)
