"""What an algorithm says of a step that one kernel can do for a whole bucket, instead of doing it tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.kernels.buckets import PayloadForm, UpdateForm

__all__ = ["MoveRule", "PayloadRule"]


@dataclass(frozen=True)
class PayloadRule:
    """That `payload` writes what `kernels.buckets.encode_payload` encodes, with β₁ and `scale` of each parameter.

    `momentum`, `denominators`: names of the state that it takes; `payload_settings` is None.
    """

    form: PayloadForm
    momentum: str
    denominators: str | None


@dataclass(frozen=True)
class MoveRule:
    """That `absorb_compressed` does nothing, and `move` what `kernels.buckets.decode_and_move` does with `rates`.

    `denominators`: the name of the state that is infinite where coordinates stay.
    """

    form: UpdateForm
    denominators: str
