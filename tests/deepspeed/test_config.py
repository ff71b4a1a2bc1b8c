"""DeepSpeed's configurations: keys that cannot change a result, accepted at any well-typed value, listed once, and
refused at a wrong type; what was written otherwise in earlier years; and files as people write them by hand."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.config.test_keys import WORKS, nested, refusal
from tests.refusing import refused
from thinwire.deepspeed.config.keys import WITHOUT_EFFECT
from thinwire.deepspeed.config.relaxed_json import NotReadableError, read_relaxed_json
from thinwire.deepspeed.sections import DeepSpeedFP16Config
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.optim.settings import WholeNumber

CPU = {"device": "cpu"}
PINNED = {"device": "cpu", "pin_memory": True}

# Values of each kind, and one of another.
VALUES: dict[Any, tuple[list[Any], Any]] = {
    bool: ([True, False], 1),
    float: ([0.5, 1], "half"),
    WholeNumber: ([0, 7, 1e14], 0.5),
    WholeNumber | bool: ([True, False, 0, 1], 0.5),
    WholeNumber | None: ([1024], 0.5),
    WholeNumber | bool | None: ([4, False], 0.5),
    str | None: (["/local_nvme"], 3),
    Mapping[str, Any] | None: ([{}, {"block_size": 262144}], [1]),
}

AS_OTHER_FILES_HAVE_THEM: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e14,
    "reduce_bucket_size": 0,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_fp16_weights_on_model_save": True,
}


HALVES = ("bf16", "fp16")


def load(world_size: int = 1, **keys: Any) -> EngineConfig:
    return load_config({"train_batch_size": 4, **keys}, world_size)


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": section}


def listed(**keys: Any) -> list[str]:
    return list(load(**keys).remarks.without_effect)


@pytest.mark.parametrize("path", WITHOUT_EFFECT)
def test_any_well_typed_value_is_listed_and_changes_nothing(path: str) -> None:
    values, wrong = VALUES[WITHOUT_EFFECT[path].kind]
    for value in [*values, "auto"]:
        config = load_config(nested(path, value), 1)
        assert config == load_config(WORKS, 1)
        assert config.remarks.without_effect == {path: WITHOUT_EFFECT[path].why}
    assert not load_config(nested(path, None), 1).remarks.without_effect
    assert f'"{path}" must be ' in refusal(nested(path, wrong))


def test_one_line_lists_them_all() -> None:
    config = load(zero_optimization=AS_OTHER_FILES_HAVE_THEM, gradient_clipping=1.0, dump_state=True)
    line = config.remarks.line()
    assert "\n" not in line
    for key in AS_OTHER_FILES_HAVE_THEM.keys() - {"stage"}:
        assert f"zero_optimization.{key}" in line
    assert "dump_state" in line
    assert "zero_optimization.stage," not in line
    assert not load(gradient_clipping=0).remarks.line()


def test_clipping_that_nobody_sets_is_off_and_said() -> None:
    config = load()
    assert config.gradient_clipping == 0.0
    assert '"gradient_clipping" is not set' in config.remarks.line()
    assert not load(gradient_clipping=0.0).remarks.unclipped
    assert [load(steps_per_print=one).steps_per_print for one in (float("inf"), 1e9)] == [None, 10**9]  # never


def test_a_warmup_that_does_not_say_where_it_ends_is_told_of() -> None:
    warmup = {"warmup_num_steps": 3, "total_num_steps": 9}
    line = load(scheduler={"type": "WarmupDecayLR", "params": warmup}).remarks.line()
    assert "rises to that of each parameter group (elsewhere it may rise to 0.001)" in line
    told = load(scheduler={"type": "WarmupDecayLR", "params": {**warmup, "warmup_max_lr": 0.01}}).remarks
    assert not told.own_peak
    assert not load(scheduler={"type": "WarmupCosineLR", "params": warmup}).remarks.own_peak


def test_remarks_stay_with_a_configuration_that_is_loaded_again() -> None:
    config = load(dump_state=True)
    again = load_config(config, 1)
    assert again == config
    assert again.remarks == config.remarks
    assert again.remarks != load_config(config.describe(), 1).remarks


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"fp16": {"loss_scale": 128}}, ["fp16.loss_scale"]),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, []),
        ({"prescale_gradients": True, "gradient_predivide_factor": 8}, ["gradient_predivide_factor"]),
        ({"gradient_predivide_factor": 8}, []),
        (zero(ignore_unused_parameters=False), ["ZERO.ignore_unused_parameters"]),
        (zero(stage=2, ignore_unused_parameters=False), []),
        ({"csv_monitor": {"output_path": "logs"}}, ["csv_monitor.output_path"]),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 500, "hysteresis": 2}},
            ["fp16.loss_scale_window", "fp16.hysteresis"],
        ),
        ({"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500}}, []),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ["activation_checkpointing.cpu_checkpointing"]),
        ({"activation_checkpointing": {"cpu_checkpointing": True, "modules": ["Layer"]}}, []),
        (
            {"wandb": {"project": "p"}, "flops_profiler": {"profile_step": 5}},
            ["wandb.project", "flops_profiler.profile_step"],
        ),
        (zero(overlap_comm=True), ["ZERO.overlap_comm"]),
        (zero(stage=1, overlap_comm=True), []),
        (zero(stage=3, overlap_comm=False), ["ZERO.overlap_comm"]),
        (zero(stage=1, overlap_comm=True) | {"optimizer": {"type": "ZeroOneAdam"}}, ["ZERO.overlap_comm"]),
        (zero(stage=2, offload_param=PINNED), ["ZERO.offload_param"]),
        (zero(stage=1, offload_optimizer=PINNED | {"device": "none"}), ["ZERO.offload_optimizer.pin_memory"]),
        (zero(stage=1, offload_optimizer=PINNED | {"nvme_path": "/d"}), ["ZERO.offload_optimizer.nvme_path"]),
        (
            zero(stage=3, reduce_bucket_size=1e6, allgather_bucket_size=0),
            ["ZERO.allgather_bucket_size", "ZERO.reduce_bucket_size"],
        ),
    ],
)
def test_keys_without_effect_beside_others(keys: dict[str, Any], expected: list[str]) -> None:
    assert listed(**keys) == [name.replace("ZERO", "zero_optimization") for name in expected]


def test_idle_values_are_put_to_their_defaults() -> None:
    zero = load(zero_optimization={"overlap_comm": True, "offload_param": {"device": "cpu"}}).zero_optimization
    assert zero == load().zero_optimization
    assert zero.offload_param.device == "none"
    stage_3 = load(zero_optimization={"stage": 3, "reduce_bucket_size": 0}).zero_optimization
    assert stage_3.reduce_bucket_size == load().zero_optimization.reduce_bucket_size


@pytest.mark.parametrize(
    ("kind", "params", "kept"),
    [
        ("OneBitAdam", {"cuda_aware": True, "comm_backend_name": "compressed"}, {}),
        ("OneBitLamb", {"cuda_aware": False, "comm_backend_name": "hccl", "set_grad_none": True}, {}),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False, "set_grad_none": False}, {"weight_decay": 0.0}),
        ("Adagrad", {"torch_adam": False}, {}),
    ],
)
def test_optimizer_parameters_that_cannot_change_a_step(kind, params, kept) -> None:
    config = load(optimizer={"type": kind, "params": params})
    assert config.optimizer.params == kept
    assert sorted(config.remarks.without_effect) == sorted(f"optimizer.params.{name}" for name in params)


# Old spellings


# In any case, and by their class.
CLASSES = {
    "FusedAdam": "Adam",
    "deepspeedcpuadam": "Adam",
    "ADAMW": "AdamW",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "onebitlamb": "OneBitLamb",
}


def clipped(optimizer: str = "AdamW", **keys: Any) -> EngineConfig:
    return load(optimizer={"type": optimizer, "params": {"lr": 0.1, "max_grad_norm": 2.5}}, **keys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": True}, zero(stage=1)),
        ({"zero_optimization": False}, {}),
        ({"zero_optimization": True, "allgather_size": 5e8}, zero(stage=1)),
        (zero(stage=2, cpu_offload=True), zero(stage=2, offload_optimizer=CPU)),
        (zero(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=True), zero(stage=2, offload_optimizer=PINNED)),
        (zero(stage=2, cpu_offload=False), zero(stage=2)),
        *(
            (zero(stage=3, cpu_offload=True, **{name: True}), zero(stage=3, offload_optimizer=CPU, offload_param=CPU))
            for name in ("cpu_offload_params", "cpu_offload_param")
        ),
        (zero(cpu_offload=True, offload_optimizer=CPU), zero(offload_optimizer=CPU)),
        ({"gradient_allreduce_op": "SUM"}, {"gradient_allreduce_op": "sum"}),
        *(({one: {f"{one}_master_weights_and_grads": False}}, {one: {}}) for one in HALVES),
        *(({"optimizer": {"type": given}}, {"optimizer": {"type": meant}}) for given, meant in CLASSES.items()),
    ],
)
def test_old_and_new_spelling_give_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = copy.deepcopy(old)
    assert load(**old) == load(**new)
    assert old == before


@pytest.mark.parametrize("optimizer", ["AdamW", "OneBitAdam", "SGD"])
def test_an_optimizers_max_grad_norm_is_gradient_clipping(optimizer: str) -> None:
    config = clipped(optimizer)
    assert config.gradient_clipping == 2.5
    assert "max_grad_norm" not in config.optimizer.params
    assert not config.remarks.unclipped
    assert clipped(optimizer, gradient_clipping=2.5) == config
    assert clipped(optimizer, gradient_clipping=None) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, '"bfloat16" is the old name of "bf16"'),
        ({"bfloat16": 3}, '"bf16" must be an object'),
        (zero(cpu_offload=True, offload_optimizer=PINNED), 'keep "zero_optimization.offload_optimizer" alone'),
        (zero(cpu_offload=1), '"zero_optimization.cpu_offload" must be true or false, got 1'),
        (zero(cpu_offload_use_pin_memory="yes"), 'cpu_offload_use_pin_memory" must be true or false, got "yes"'),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 2.5}}, "gradient_clipping": 1.0},
            'max_grad_norm" is 2.5 and "gradient_clipping" is 1.0',
        ),
        (zero(zenflow={}), '"zero_optimization.zenflow" can only be null, got {}'),
        *(
            ({section: {f"{section}_{what}": True}}, f'"{section}.{section}_{what}" can only be false, got true')
            for section, what in (("bf16", "optimizer_states"), *((one, "master_weights_and_grads") for one in HALVES))
        ),
        (
            {"managed_gradient_accumulation": False, "progressive_layer_drop": {"enabled": True}},
            '"progressive_layer_drop" does not go with "managed_gradient_accumulation" false',
        ),
        (zero(stage=3, reduce_bucket_size="big"), 'reduce_bucket_size" must be a whole number, got "big"'),
    ],
)
def test_what_cannot_be_followed(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert message in str(caught.value)


# Files: comments, commas left out or left over, names without quotes; and strictness where Hjson would hide a mistake

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**38), 10**38)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Halves of characters beyond 16 bits are no text.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(TREES, st.sampled_from([None, 2]), st.booleans())
def test_json_is_read_as_pythons_own_reader_does(tree: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps({"tree": tree}, indent=indent, ensure_ascii=ascii_only)
    assert read_relaxed_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [1, 2,],}', {"a": 1, "b": [1, 2]}),
        ("{a: 1 # one\n b: 2 // two\n /* three\n */ c: 3 /* here */, d: 4}", {"a": 1, "b": 2, "c": 3, "d": 4}),
        (
            "# first\ntrain_batch_size: 4\noptimizer: {\n  type: Adam\n}\n",
            {"train_batch_size": 4, "optimizer": {"type": "Adam"}},
        ),
        (
            "{\n  type: Adam\n  params:\n  {\n    lr: 1e-4\n    betas:\n    [\n      0.9\n      0.95\n    ]\n  }\n}",
            {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        ),
        ('{\'it\': \'it\\\'s "so"\', "a\\u00e9": "// no # comment"}', {"it": 'it\'s "so"', "aé": "// no # comment"}),
        ("{a: true, b: false, c: null, d: -0.5e+3}", {"a": True, "b": False, "c": None, "d": -500.0}),
        ("\ufeff{a: 1}\r\n", {"a": 1}),
        ("a: True\nb: 1.0.0", {"a": "True", "b": "1.0.0"}),
    ],
)
def test_what_people_write(text: str, expected: Any) -> None:
    assert read_relaxed_json(text) == expected
    assert read_relaxed_json("{a: -" + "7" * 5000 + "}")["a"].bit_length() > 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "lr": 1e-4 "x": 2}', r'line 2 column 9: "1e-4 \\"x\\": 2}" is no value: a comma is missing, or quotes'),
        ("{type: Adam, lr: 1}", '"Adam, lr: 1}" is no value'),
        ("a: http://host # where", "is no value"),
        ('{"a": }', 'line 1 column 7: a value is missing before "}"'),
        ('{"a" 1}', 'a colon must follow the name "a"'),
        ("{a: 1}}", 'line 1 column 7: nothing may follow, but there is "}"'),
        ('{"a": 1,\n "b": [1', r'line 2 column 9: the text ends inside a list: a "\]" is missing'),
        ('{"a": "b" "c": 1}', "must come after a comma or on a new line"),
        ('{"a": 1,, "b": 2}', "column 9: a name must stand here"),
        ('{"a": "x\n"}', "a string that ends on its line must stand here"),
        ("{a: '''x\n'''}", "a text over several lines"),
        (r'{"a": "\q"}', r"Invalid \\escape"),
        ("{a: NaN\n}", "NaN is not JSON: write a number"),
        ("/* a", "this comment does not end"),
        ("", "a value is missing"),
        ("{a: 1, b: 2\n a: 3}", '"a" is there twice in one object: 1 and 3, at line 2'),
    ],
)
def test_texts_that_cannot_be_meant(text: str, message: str) -> None:
    refused(NotReadableError, message, read_relaxed_json, text)


@pytest.mark.parametrize("key", ["loss_scale", "loss_scale_window", "min_loss_scale"])
def test_numbers_of_a_section_may_be_text(key: str) -> None:
    assert getattr(DeepSpeedFP16Config(**{key: "3"}), key) == 3
    for wrong, message in (([], "must be a number"), (True, "must be a number"), ("x", "must be a number"), (-1, "")):
        refused(ValueError, message, DeepSpeedFP16Config, **{key: wrong})


def test_a_file_with_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  // Of the paper.\n  "train_batch_size": 8,\n  "fp16": {"enabled": true,},  # halves\n}\n')
    assert load_config(path, 2) == load_config({"train_batch_size": 8, "fp16": {"enabled": True}}, 2)
    path.write_text("train_batch_size: 8\nfp16: {\n  enabled: True\n}")
    refused(ConfigError, r'"fp16.enabled" must be true or false, got "True"', load_config, path, 1)
