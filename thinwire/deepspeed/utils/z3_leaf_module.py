"""deepspeed.utils.z3_leaf_module: how stage 3 cuts a model."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules"]

_INSTEAD = "stage 3 is torch's FSDP2, which gathers a whole layer before any of it runs; leave the call out"

get_z3_leaf_modules = not_offered("utils.get_z3_leaf_modules", _INSTEAD)
set_z3_leaf_module = not_offered("utils.set_z3_leaf_module", _INSTEAD)
set_z3_leaf_modules = not_offered("utils.set_z3_leaf_modules", _INSTEAD)
unset_z3_leaf_modules = not_offered("utils.unset_z3_leaf_modules", _INSTEAD)
