"""deepspeed.utils.OnDevice."""

from __future__ import annotations

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """Parameters made inside are of `dtype`, and on `device`: "meta" for a model that has shapes only."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)
