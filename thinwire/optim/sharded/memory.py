"""How many bytes a rank holds of a model's state once an algorithm's frozen stage has packed it."""

from __future__ import annotations

__all__ = ["frozen_state_formula"]


def frozen_state_formula(
    parameters: int, world_size: int, *, element_bytes: int = 2, fresh_variance: bool = False
) -> dict[str, float]:
    """Bytes a rank should hold, by category, at ZeRO stages 1 and 2.

    With Ψ parameters on N ranks, in 16 bits: weights 2Ψ, worker residuals 2Ψ, preconditioner and momentum 1.125Ψ, and
    master weights and owner residuals 8Ψ/N; in fp32 9.125Ψ + 4Ψ/N.

    Args:
        parameters: Ψ, trained ones.
        world_size: N.
        element_bytes: of a parameter as the model sees it.
        fresh_variance: 1-bit LAMB's: another 4Ψ/N.
    """
    shared = 1 / world_size
    each = {
        "weights": element_bytes,
        "masters": (0 if element_bytes == 4 else 4) * shared,
        "gradients": 0,
        "residuals": element_bytes + 4 * shared,
        "optimizer state": 1 + 1 / 8 + (4 * shared if fresh_variance else 0),
    }
    return {category: parameters * factor for category, factor in each.items()}
