"""What counts as a batch's size, and when it is another than the configuration says."""

from __future__ import annotations

import warnings

import pytest
import torch

from thinwire.engine.data import first_dimension, warn_of_another_size


def test_first_dimension() -> None:
    assert first_dimension((torch.tensor(1.0), {"a": ["x", torch.ones(4, 2)]}, torch.ones(3))) == 4
    assert first_dimension(({}, [], "text", torch.tensor(1))) is None


def test_a_warning_names_both_sizes() -> None:
    with pytest.warns(RuntimeWarning, match="rank 3 got a first batch of 2 samples.* is 4"):
        warn_of_another_size({"ids": torch.ones(2, 9)}, 4, rank=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_another_size(torch.ones(4), 4, rank=0)
        warn_of_another_size("no tensor", 4, rank=0)
