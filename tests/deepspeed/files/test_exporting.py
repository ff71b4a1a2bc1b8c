"""The calls of DeepSpeed's zero_to_fp32, over thinwire's own checkpoints, and the files that it writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.checkpoint.jobs import Values, same, save
from tests.engine.tiny import make_engine, make_model, settings, train
from tests.refusing import refused
from thinwire.comm import threads
from thinwire.command_line import main
from thinwire.deepspeed.files.exporting import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from thinwire.engine.checkpoint.exporting import file_size
from thinwire.engine.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Saved twice in a training in bf16 on 2 ranks; and the fp32 values of the last step, under every name."""
    folder = tmp_path_factory.mktemp("in")

    def body(comm):
        engine = make_engine(comm, settings(2, bf16={"enabled": True}))
        for step in range(2):
            train(engine, [step])
            engine.save_checkpoint(folder)
        master_weights = [one for one in engine.optimizer.saved_slices() if one.kind == "master"]
        return {name: one.float() for name, one in engine.module.state_dict().items()}, master_weights

    results = threads.run(body, 2)
    values = results[0][0]
    for _, master_weights in results:
        for one in master_weights:
            values[one.name].view(-1)[one.start : one.start + one.tensor.numel()] = one.tensor
    values["unmix.weight"] = values["mix.weight"]
    return folder, values


def test_the_state_dict(saved) -> None:
    folder, expected = saved
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found.keys() == expected.keys() == make_model().state_dict().keys()
    for name, one in found.items():
        assert one.dtype == torch.float32
        assert same(one, expected[name]), name
        assert not name.startswith("layers") or not same(one, one.bfloat16().float()), "these are master weights"
    assert found["unmix.weight"] is found["mix.weight"]
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(folder), "global_step2", lazy_mode=True)
    assert all(lazy[name].shape == one.shape and same(lazy[name].contiguous(), one) for name, one in found.items())
    earlier = get_fp32_state_dict_from_zero_checkpoint(folder, "global_step1")
    assert not same(earlier["mix.weight"], found["mix.weight"])
    few = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert found.keys() - few.keys() == {"frozen"}
    model = make_model(1).to(torch.bfloat16).float()
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    assert all(same(one, found[name]) for name, one in model.state_dict().items())


def test_scripts_open_the_file_that_deepspeed_would_have_written(tmp_path, capsys, warm) -> None:
    """What was saved, by DeepSpeed's names, to be read without any class; `import` takes the weights from it."""
    state = {"epoch": 3, "best": torch.ones(2), "pair": (1, 2)}

    def body(comm):
        engine = make_engine(comm, settings(1, bf16={"enabled": True}))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path / "saved", tag="second", client_state=state)
        return {name: one.clone() for name, one in engine.module.state_dict().items()}

    expected, _ = threads.run(body, 2)
    export = ["checkpoint", "export", str(tmp_path / "saved"), str(tmp_path / "theirs"), "--format", "deepspeed"]
    assert main(export) == 0
    path = tmp_path / "theirs" / "second" / "mp_rank_00_model_states.pt"
    assert f"{path}: of the weights of second" in capsys.readouterr().out
    found = torch.load(path, weights_only=True)
    assert (tmp_path / "theirs" / "latest").read_text() == "second"
    assert found["module"].keys() == expected.keys()
    assert all(one.dtype == expected[name].dtype and same(one, expected[name]) for name, one in found["module"].items())
    assert (found["global_steps"], found["dp_world_size"], found["epoch"], found["pair"]) == (2, 2, 3, (1, 2))
    assert torch.equal(found["best"], state["best"])
    assert (found["buffer_names"], found["shared_params"]) == (["calls"], {"unmix.weight": "mix.weight"})
    assert main([*export, "--dtype", "bf16"]) == 2
    assert "--dtype is for another --format" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), "--weights-only"]) == 0
    other = make_engine(None, settings(0, bf16={"enabled": True}), seed=1)
    assert other.load_checkpoint(tmp_path / "theirs-thinwire", load_module_only=True)[0]
    assert all(same(one, expected[name]) for name, one in other.module.state_dict().items())


def test_one_file_or_several(saved, tmp_path) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(saved[0])
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["pytorch_model.bin"]
    whole = torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)
    assert whole.keys() == found.keys()
    assert all(same(one, found[name]) for name, one in whole.items())
    for safe, stem, read in (
        (False, "pytorch_model.bin", lambda path: torch.load(path, weights_only=True)),
        (True, "model.safetensors", load_file),
    ):
        folder = tmp_path / stem
        options = {"max_shard_size": "10KB", "exclude_frozen_parameters": True}
        convert_zero_checkpoint_to_fp32_state_dict(saved[0], folder, safe_serialization=safe, **options)
        index = json.loads((folder / f"{stem}.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 2
        assert {path.name for path in folder.iterdir()} == files | {f"{stem}.index.json"}
        parts = {name: read(folder / name) for name in files}
        assert index["weight_map"].keys() == found.keys() - {"frozen"}
        assert all(same(parts[file][name], found[name]) for name, file in index["weight_map"].items())
        # torch.save keeps tied tensors one; safetensors has a copy for each name.
        sizes = [sum({one.data_ptr(): one.nbytes for one in part.values()}.values()) for part in parts.values()]
        assert max(sizes) <= 10_000
        assert index["metadata"]["total_size"] == sum(sizes)


def test_the_command(saved, tmp_path, capsys) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(saved[0], "global_step1")
    arguments = ["checkpoint", "export", str(saved[0]), str(tmp_path / "out"), "--format", "deepspeed-fp32"]
    assert main([*arguments, "--tag", "global_step1"]) == 0
    assert "pytorch_model.bin: of the fp32 weights of global_step1" in capsys.readouterr().out
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(same(one, found[name]) for name, one in written.items())
    assert main([*arguments, "--dtype", "bf16"]) == 2
    assert main([*arguments, "--max-shard-size", "big"]) == 2
    assert "'5GB', got 'big'" in capsys.readouterr().err
    assert main([*arguments, "--safe-serialization", "--exclude-frozen-parameters"]) == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == written.keys() - {"frozen"}


def test_what_is_not_there(tmp_path) -> None:
    refused(CheckpointError, "no checkpoint in", get_fp32_state_dict_from_zero_checkpoint, tmp_path)
    save(tmp_path, ("step-1", Values(1, 2)))
    with pytest.raises(CheckpointError, match="does not say which of its parameters were frozen"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path)["scale"].shape == ()


@pytest.mark.parametrize(
    ("given", "size"), [(7, 7), ("7", 7), ("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 << 20), (None, None)]
)
def test_sizes(given, size) -> None:
    assert file_size(given) == size
    for wrong in ("big", "5 XB", 0, "-1", 2.5, True):
        refused((ValueError, TypeError), "largest size is a number of bytes", file_size, wrong)
