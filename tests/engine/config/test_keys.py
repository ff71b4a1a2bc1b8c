"""No key slips through: misspelt ones at any depth, ones that DeepSpeed has and thinwire has not, and "auto"."""

import copy
import string
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thinwire.deepspeed.config.keys import DECLINED, WITHOUT_EFFECT
from thinwire.engine.config import ConfigError, load_config
from thinwire.engine.config.errors import AUTO
from thinwire.engine.config.models import EngineConfig
from thinwire.engine.errors import printable

WORKS: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "SGD"}}
SECTIONS = [
    "fp16",
    "bf16",
    "zero_optimization",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "flops_profiler",
    "comms_logger",
    "checkpoint",
]
SECTIONS += ["thinwire", "activation_checkpointing"]
OLD = [f"zero_optimization.cpu_offload{rest}" for rest in ("", "_param", "_params", "_use_pin_memory")]
OLD += [f"zero_optimization.zero_{rest}" for rest in ("quantized_weights", "quantized_gradients", "hpz_partition_size")]


def all_keys() -> list[str]:
    keys = list(EngineConfig.model_fields)
    for name in SECTIONS:
        section = EngineConfig.model_fields[name].annotation
        keys += [f"{name}.{key}" for key in section.model_fields]
    keys += [f"zero_optimization.offload_optimizer.{key}" for key in ("device", "pin_memory", "nvme_path")]
    return keys


def nested(path: str, value: Any) -> dict[str, Any]:
    """A configuration that works, with `value` at the dotted `path`."""
    *parents, key = path.split(".")
    tree = copy.deepcopy(WORKS)
    section = tree
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return tree


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(tree, 1)
    return str(caught.value)


@st.composite
def misspelt(draw: st.DrawFn) -> tuple[str, str]:
    """A known key, and the same with one letter changed, dropped, doubled or swapped with the next."""
    path = draw(st.sampled_from([key for key in all_keys() if len(key.rpartition(".")[2]) >= 6]))
    parent, dot, key = path.rpartition(".")
    place = draw(st.integers(0, len(key) - 2))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_"))
    changed, dropped = key[:place] + letter + key[place + 1 :], key[:place] + key[place + 1 :]
    doubled, swapped = key[: place + 1] + key[place:], key[:place] + key[place + 1] + key[place] + key[place + 2 :]
    wrong = draw(st.sampled_from([changed, dropped, doubled, swapped, key.upper()]))
    assume(wrong != key)
    return path, parent + dot + wrong


@given(misspelt())
def test_a_misspelt_key_is_told_with_its_path_and_the_nearest_known_one(pair: tuple[str, str]) -> None:
    path, wrong = pair
    message = refusal(nested(wrong, 1))
    assert f'"{wrong}" is not a known key. Did you mean ' in message
    assert f'"{path.rpartition(".")[2]}"' in message


@given(st.sampled_from(all_keys()), st.text(min_size=1, max_size=12))
def test_no_other_key_is_accepted_in_any_section(path: str, key: str) -> None:
    parent, dot, _ = path.rpartition(".")
    every = (*all_keys(), *DECLINED, *WITHOUT_EFFECT, *OLD)
    known = {name.rpartition(".")[2] for name in every if name.rpartition(".")[0] == parent}
    assume(key not in known and not {".", "\0"} & {*key} and key != "allgather_bucket_size")
    told = printable(key).replace("\n", "\\n")
    assert f'"{parent}{dot}{told}" is not a known key' in refusal(nested(parent + dot + key, 0))


def test_each_key_stands_in_one_table() -> None:
    assert not DECLINED.keys() & WITHOUT_EFFECT.keys()
    assert not {*all_keys()} & {*DECLINED, *WITHOUT_EFFECT}


@pytest.mark.parametrize("path", DECLINED)
def test_what_thinwire_does_not_do_is_refused_and_what_it_does_anyway_is_not(path: str) -> None:
    declined = DECLINED[path]
    for match in declined.matches:
        assert load_config(nested(path, match), 1) == load_config(WORKS, 1)
    message = refusal(nested(path, "something else"))
    assert f'"{path}"' in message
    assert declined.instead in message


@pytest.mark.parametrize("section", ["trackio", "amp", "elasticity"])
def test_a_section_that_is_not_supported_may_only_be_off(section: str) -> None:
    assert load_config(nested(section, {"enabled": False, "whatever": 1}), 1)
    assert load_config(nested(section, {}), 1)
    assert load_config(nested(section, None), 1)
    assert f'"{section}" is not supported' in refusal(nested(section, {"enabled": True}))
    assert f'"{section}" is not supported' in refusal(nested(section, {"whatever": 1}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("stage", 1, '"stage" is not a known key. It belongs at "zero_optimization.stage"'),
        ("zero_optimization.gradient_clipping", 1.0, 'It belongs at "gradient_clipping"'),
        ("zero_optimization.offload_param.xyzzy", 1, "Known here: device, "),
        ("trackio", {"enabled": True}, 'use "tensorboard", "csv_monitor" or "wandb"'),
        ("comet", {"enabled": True}, 'use "tensorboard", "csv_monitor" or "wandb"'),
        ("flops_profiler.step", 2, 'can only be 1, got 2: write "profile_step"'),
        ("autotuning", {"enabled": True}, "`thinwire plan` predicts step time and memory"),
        ("zero_optimization.zero_quantized_weights", True, '"zero_optimization.weights_codec" is for stage 3: use'),
        ("zero_optimization.zero_quantized_gradients", 4, 'must be true or false, got 4: true is "gradients_codec"'),
        (
            "zero_optimization.zero_hpz_partition_size",
            0,
            '"zero_optimization.node_size" must be a whole number, at least 1, got',
        ),
        *(
            (path, "auto", f'"{path}" is "auto", which is filled in only by thinwire.hugging_face.Trainer(')
            for path in sorted(AUTO)
        ),
        *(
            (path, "auto", f'"{path}" cannot be "auto"')
            for path in ("seed", "steps_per_print", "fp16.hysteresis", "optimizer", "tensorboard.output_path")
        ),
    ],
)
def test_refusals_say_what_to_do(path: str, value: Any, message: str) -> None:
    assert message in refusal(nested(path, value))


def test_a_key_that_is_no_string() -> None:
    assert '"7" is not a known key' in refusal({"train_batch_size": 4, 7: 1})  # type: ignore[dict-item]


COMPRESSED_NOWHERE: dict[str, Any] = {
    "layer_reduction": {"enabled": False, "keep_number_layer": 5},
    "weight_quantization": {
        "shared_parameters": {"enabled": False, "quantization_type": "symmetric"},
        "different_groups": {"wq1": {"params": {"start_bits": 8}, "modules": ["attention"]}},
    },
}


def test_a_section_is_off_where_all_its_parts_are() -> None:
    assert load_config(nested("compression_training", COMPRESSED_NOWHERE), 1)
    on = COMPRESSED_NOWHERE | {"layer_reduction": {"enabled": True}}
    assert '"compression_training" is not supported: give "quantized_training"' in refusal(
        nested("compression_training", on)
    )
