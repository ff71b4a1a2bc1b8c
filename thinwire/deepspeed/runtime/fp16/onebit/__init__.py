"""deepspeed.runtime.fp16.onebit: the 1-bit optimizers."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    ("adam", "lamb", "zoadam"),
    {
        "runtime.fp16.onebit.adam": ("OnebitAdam",),
        "runtime.fp16.onebit.lamb": ("OnebitLamb",),
        "runtime.fp16.onebit.zoadam": ("ZeroOneAdam",),
    },
)
