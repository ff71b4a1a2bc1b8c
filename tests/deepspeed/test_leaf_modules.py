"""Modules are marked as leaves of stage 3, and found again, by DeepSpeed's calls."""

from __future__ import annotations

import pytest
from torch import nn

from thinwire.deepspeed.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)


def test_modules_are_marked_by_class_and_by_name() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2), nn.ReLU())
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model, [nn.Linear]) == get_z3_leaf_modules(model) == [model[0][0], model[1]]
    assert set_z3_leaf_modules(model, ["ModuleList", "torch.nn.modules.activation.ReLU"]) == [model[0], model[2]]
    assert unset_z3_leaf_modules(model, [nn.Linear, nn.ReLU]) == [model[0][0], model[1], model[2]]
    assert get_z3_leaf_modules(model) == [model[0]]
    set_z3_leaf_module(model, True)
    assert z3_leaf_module(model)
    assert not z3_leaf_module(model[1])


def test_what_is_not_there_is_said() -> None:
    model = nn.Linear(2, 2)
    for call in (set_z3_leaf_modules, unset_z3_leaf_modules):
        with pytest.raises(ValueError, match=r"Linear has no module of \[.*Conv2d"):
            call(model, [nn.Conv2d])
        assert call(model, [nn.Conv2d], raise_if_not_found=False) == []
        with pytest.raises(AssertionError, match="is a list of classes, or of their names, got"):
            call(model, nn.Linear)
