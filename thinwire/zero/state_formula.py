"""How many bytes a rank holds of a model's state, by ZeRO's formulas. No tensors: a plan asks without torch."""

from __future__ import annotations

__all__ = ["model_state_formula"]


def model_state_formula(
    stage: int,
    parameters: int,
    world_size: int,
    *,
    element_bytes: int = 2,
    state_bytes: float = 8,
    gradient_bytes: int | None = None,
) -> dict[str, float]:
    """Bytes a rank should hold, by category; their sum is the published figure.

    With Ψ parameters on N ranks, bf16 or fp16 with fp32 masters and Adam (Rajbhandari et al. 2020, arXiv 1910.02054,
    §5): stage 0 16Ψ, 1 4Ψ + 12Ψ/N, 2 2Ψ + 14Ψ/N, 3 16Ψ/N. fp32 parameters, their own
    master weights, have 4 + 4 + 8.

    Args:
        stage: 0 to 3.
        parameters: Ψ, trained ones.
        world_size: N.
        element_bytes: of a parameter as the model sees it: 2 or 4.
        state_bytes: of the optimizer a parameter: Adam 8, SGD with momentum 4, without 0.
        gradient_bytes: of a gradient that adds up, by default those of a parameter.

    Raises ValueError for a stage, size or combination that there is no formula for.
    """
    if stage not in (0, 1, 2, 3) or element_bytes not in (2, 4):
        raise ValueError(
            f"there is no formula for stage {stage} with parameters of {element_bytes} bytes: stages are 0 to 3, in "
            "fp32, bf16 or fp16"
        )
    masters = 0 if element_bytes == 4 else 4
    shared = 1 / world_size
    each = {
        "weights": element_bytes * (shared if stage == 3 else 1),
        "masters": masters * (shared if stage >= 1 else 1),
        "gradients": (gradient_bytes or element_bytes) * (shared if stage >= 2 else 1),
        "optimizer state": state_bytes * (shared if stage >= 1 else 1),
    }
    return {category: parameters * factor for category, factor in each.items()}
