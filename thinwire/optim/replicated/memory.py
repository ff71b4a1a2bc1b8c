"""What optimizers hold whose state every rank has, counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from thinwire.optim.bucket import AlgorithmBucket

__all__ = ["frozen_bytes"]


def frozen_bytes(
    parameters: Sequence[Tensor], states: Iterable[Mapping[str, Tensor]], buckets: Iterable[AlgorithmBucket]
) -> dict[str, float]:
    """Bytes of a rank once frozen, by what they are for; counted, as nobody has published a formula."""
    entries = [(name, one) for state in states for name, one in state.items()]
    exchanges = [one.compressed for one in buckets if one.compresses]
    residuals = [one for ex in exchanges for one in (ex.worker_residual, ex.owner_residual) if one is not None]
    weights = float(sum(parameter.nbytes for parameter in parameters))
    return {
        "weights": weights,
        "masters": float(sum(one.nbytes for name, one in entries if name == "master")),
        "gradients": weights,
        "residuals": float(sum(one.nbytes for one in residuals)),
        "optimizer state": float(sum(one.nbytes for name, one in entries if name != "master")),
    }
