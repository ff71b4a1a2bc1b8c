"""What cannot be imported is refused by name: files that are missing, of another save, damaged, or that would run code
if they were opened as pickles are."""

import argparse
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.deepspeed.files.deepspeed_files import (
    FIXED_SCALE,
    deepspeeds_names,
    write_sharded,
    write_universal,
    write_unsharded,
)
from tests.deepspeed.files.test_import import check_bits, imported, make_trained, read_here
from tests.engine.checkpoint.kill import exit_code, fork
from tests.refusing import refused
from thinwire.comm import threads
from thinwire.command_line import main
from thinwire.deepspeed.files.importing import import_checkpoint
from thinwire.engine.checkpoint.client_state import unpack_client_state
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError, UsageError

ENDLESS: list = []
ENDLESS.append(ENDLESS)
FIRST, SECOND = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
MODEL = "mp_rank_00_model_states.pt"


def remove(path: Path, name: str) -> None:
    (path / name).unlink()


def cut(path: Path, name: str) -> None:
    os.truncate(path / name, (path / name).stat().st_size // 2)


def change(path: Path, name: str, edit: Callable[[dict], object], **options: bool) -> None:
    """Edit a file as somebody with DeepSpeed would; `options` are torch.save's."""
    with deepspeeds_names():
        content = torch.load(path / name, weights_only=False)
        edit(content)
        torch.save(content, path / name, **options)


def flip(path: Path) -> None:
    """Turn one bit of a tensor over."""
    with zipfile.ZipFile(path) as archive:
        one = max((one for one in archive.infolist() if "/data/" in one.filename), key=lambda one: one.file_size)
    content = bytearray(path.read_bytes())
    header = content[one.header_offset :]
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    content[one.header_offset + 30 + lengths + one.file_size // 2] ^= 1
    path.write_bytes(content)


def compress(path: Path) -> None:
    """Pack a file anew, as an archiver does."""
    with zipfile.ZipFile(path) as archive:
        entries = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def replace(path: Path, name: str, target: str | None) -> None:
    """Put a FIFO, or a link to `target`, in a file's place."""
    (path / name).unlink()
    if target is None:
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to(target)


def repeated(value: object, times: int) -> object:
    """Ten of ten of ten of the same."""
    return value if not times else [repeated(value, times - 1)] * 10


def of_another_run(path: Path) -> None:
    write_sharded(path.parent / "other", make_trained(8), 2, 2)
    for name in (FIRST, SECOND):
        shutil.copy(path.parent / "other" / "global_step4" / name, path / name)


FAULTS = {
    "no second rank": (
        lambda path: remove(path, SECOND),
        "saved by 2 ranks and holds .* of 1: those of rank 1 are missing",
    ),
    "no first rank": (lambda path: remove(path, FIRST), f"none of rank 0: {FIRST} is missing"),
    "no optimizer": (
        lambda path: [remove(path, name) for name in (FIRST, SECOND)],
        r"no optimizer files, zero_pp_rank_\*_optim_states\.pt, though it was saved with ZeRO",
    ),
    "no model": (lambda path: remove(path, MODEL), f"no {MODEL}"),
    "one rank too many": (
        lambda path: shutil.copy(path / SECOND, path / SECOND.replace("rank_1", "rank_2")),
        "saved by 2 ranks and holds .* of 3: those of rank 2 are of another save",
    ),
    "a rank twice": (
        lambda path: shutil.copy(path / SECOND, path / f"bf16_{SECOND}"),
        "both of rank 1: two checkpoints were saved there",
    ),
    "cut short": (lambda path: cut(path, SECOND), f"{SECOND} cannot be read"),
    "no pickle": (lambda path: (path / SECOND).write_bytes(b"nothing"), f"{SECOND} cannot be read"),
    "a folder": (lambda path: (remove(path, SECOND), (path / SECOND).mkdir()), f"{SECOND} cannot be read"),
    "compressed": (lambda path: compress(path / SECOND), f"{SECOND} cannot be read: .*data.pkl is compressed: another"),
    "a FIFO": (lambda path: replace(path, MODEL, None), f"{MODEL} cannot be read: .*is not a file"),
    "an endless device": (lambda path: replace(path, SECOND, "/dev/zero"), f"{SECOND} cannot be read: .*is not a file"),
    "an element expanded": (
        lambda path: change(path, MODEL, lambda it: it.update(mine=torch.ones(1).expand(500_000_000))),
        f"{MODEL} cannot be read: .*more than 10 times the file's size",
    ),
    "the same list again and again": (
        lambda path: change(path, MODEL, lambda it: it.update(mine=repeated("text", 8))),
        f"{MODEL} cannot be read: .*more than 10 times the file's size",
    ),
    "a number of a million bits": (
        lambda path: change(path, MODEL, lambda it: it.update(mine=1 << 1_000_000)),
        f"{MODEL} cannot be read: .*what is not read from such files: Unsupported operand",
    ),
    "another run's": (of_another_run, "has other values in the model's file than in the optimizer files"),
    "tensor parallel": (
        lambda path: shutil.copy(path / MODEL, path / "mp_rank_01_model_states.pt"),
        "mp_rank_01_model_states.pt is of tensor or pipeline parallelism",
    ),
    "a pipeline's, or experts'": (
        lambda path: shutil.copy(path / MODEL, path / "layer_01-model_00-model_states.pt"),
        "layer_01.* is of pipeline parallelism, or of experts",
    ),
    "no shapes": (lambda path: change(path, MODEL, lambda it: it.pop("param_shapes")), "holds no param_shapes"),
    "fewer values": (
        lambda path: change(
            path,
            SECOND,
            lambda it: it["optimizer_state_dict"]["single_partition_of_fp32_groups"].__setitem__(0, torch.ones(3)),
        ),
        "ends at element .*: the files are of another model, or cut short",
    ),
    "shorter moments": (
        lambda path: change(
            path,
            SECOND,
            lambda it: it["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(exp_avg=torch.ones(2)),
        ),
        "exp_avg of .* has .* values",
    ),
    "a strange stage": (
        lambda path: [
            change(path, name, lambda it: it["optimizer_state_dict"].update(zero_stage=9)) for name in (FIRST, SECOND)
        ],
        "ZeRO stage 9",
    ),
    "a strange type": (
        lambda path: change(path, SECOND, lambda it: it.update(optimizer_state_dict=[1])),
        "optimizer_state_dict: Input should be a valid dictionary",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named(tmp_path, fault: str) -> None:
    path = write_sharded(tmp_path / "in", make_trained(0), 2, 2)
    damage, message = FAULTS[fault]
    damage(path)
    refused(CheckpointError, message, imported, tmp_path / "in")
    check_nothing_is_left(tmp_path / "imported")


def check_nothing_is_left(folder: Path) -> None:
    """Nothing but the folder's lock."""
    assert not folder.exists() or [path.name for path in folder.iterdir()] in ([], [".lock"])


def base_of(content: dict) -> dict:
    return content["optimizer_state_dict"]["base_optimizer_state"]


EDITS: list[tuple[str, Callable[[dict], object], str]] = [
    (MODEL, lambda it: it.update(global_steps=-1), "global_steps: .*greater than or equal to 0"),
    (MODEL, lambda it: it.update(global_samples=float("inf")), "global_samples: "),
    (MODEL, lambda it: it.update(skipped_steps=None), "skipped_steps: "),
    (MODEL, lambda it: it.update(param_shapes=3), "param_shapes: .*list"),
    (MODEL, lambda it: it["param_shapes"][0].update({"up.weight": [13, -5]}), r"param_shapes\.0\.up\.weight\.1: "),
    (MODEL, lambda it: it["module"].update({"up.weight": torch.ones(2)}), r"has up\.weight in the shapes"),
    (MODEL, lambda it: it["module"].update({"up.weight": [1.0]}), "module: .*up.weight is list, a tensor was expected"),
    (MODEL, lambda it: it.update(buffer_names=[["seen"]]), r"buffer_names\.0: .*string"),
    (MODEL, lambda it: it.update(shared_params=["head.weight"]), "shared_params: .*dictionary"),
    (MODEL, lambda it: it.update(shared_params={"up.bias": "down.bias"}), "up.bias as another name of down.bias"),
    (MODEL, lambda it: it.update(shared_params={"up.bias": "up.bias"}), "up.bias as another name of up.bias"),
    (MODEL, lambda it: it.update(ds_config=[1]), "ds_config: .*dictionary"),
    (MODEL, lambda it: it["ds_config"]["optimizer"].update(type=3), r"ds_config\.optimizer\.type: .*string"),
    (MODEL, lambda it: it["lr_scheduler"].update(last_batch_iteration=float("inf")), "last_batch_iteration: "),
    (SECOND, lambda it: it["optimizer_state_dict"].update(partition_count="2"), r"partition_count\.0: .*integer"),
    (SECOND, lambda it: it["optimizer_state_dict"].update(partition_count=-2), r"partition_count\.0: "),
    (SECOND, lambda it: it["optimizer_state_dict"].update(loss_scaler=[1.0]), r"loss_scaler: .*dictionary"),
    (SECOND, lambda it: base_of(it).update(state=[3]), r"base_optimizer_state\.state: .*dictionary"),
    (SECOND, lambda it: base_of(it)["state"][0].update(step=float("inf")), r"state\.0: .*step is inf"),
    (SECOND, lambda it: base_of(it)["state"][0].update(step=torch.tensor(-1.0)), r"state\.0: .*step is -1"),
    (SECOND, lambda it: base_of(it)["state"][0].update(master=torch.ones(3)), r"state\.0: .*'master' is no name"),
    (SECOND, lambda it: base_of(it)["param_groups"][0].update(params="0"), r"param_groups\.0\.params: .*list"),
    (SECOND, lambda it: base_of(it)["param_groups"][0].update(lr="fast"), r"param_groups\.0\.lr: .*number"),
    (SECOND, lambda it: base_of(it)["param_groups"][0].update(betas=(0.9, float("nan"))), r"0\.betas\.1: .*finite"),
]


@pytest.mark.parametrize(("name", "edit", "message"), EDITS)
def test_values_of_other_types_are_named(tmp_path, name: str, edit: Callable[[dict], object], message: str) -> None:
    change(write_sharded(tmp_path / "in", make_trained(0), 2, 2), name, edit)
    refused(CheckpointError, f"{name} .*{message}", imported, tmp_path / "in")
    check_nothing_is_left(tmp_path / "imported")


def test_fp32_copies_of_other_groups_are_refused(tmp_path) -> None:
    for number, flat in enumerate((True, False)):
        path = write_unsharded(tmp_path / f"{number}" / "in", make_trained(0), torch.bfloat16, flat)
        change(
            path, MODEL, lambda it: (it["optimizer"].get("fp32_groups_flat") or it["optimizer"]["fp32_groups"]).pop()
        )
        refused(CheckpointError, f"{MODEL} holds fp32 copies of other groups", imported, path.parent)


def test_a_universal_parameter_lacks_no_kind_of_state(tmp_path) -> None:
    path = write_universal(tmp_path / "in", make_trained(0), 1)
    (path / "zero" / "up.weight" / "exp_avg.pt").unlink()
    refused(CheckpointError, r"exp_avg\.pt is missing", imported, tmp_path / "in")


class Hoard:
    """A few bytes that ask for a gigabyte each."""

    def __reduce__(self) -> tuple[object, ...]:
        return bytearray, (1 << 30,)


def test_memory_is_bounded_by_the_size_of_the_file(tmp_path, warm) -> None:
    write_sharded(tmp_path / "in", make_trained(0, mine=[Hoard() for _ in range(64)]), 1, 1)
    refused(
        CheckpointError, f"{MODEL} cannot be read: MemoryError", import_checkpoint, tmp_path / "in", tmp_path / "out"
    )


WRITES = {
    "stage 0": write_unsharded,
    "stage 1": partial(write_sharded, stage=1, world=2),
    "stage 2": partial(write_sharded, stage=2, world=2),
    "stage 3": partial(write_sharded, stage=3, world=2),
    "universal": partial(write_universal, stage=1),
    "universal of stage 3": partial(write_universal, stage=3),
}


@pytest.mark.parametrize("write", WRITES)
def test_one_bit_of_any_file_is_noticed(tmp_path, write: str) -> None:
    path = WRITES[write](tmp_path / "in", make_trained(0, frozen=write != "stage 0"))
    by_name = {one.name: one for one in path.rglob("*.pt") if one.stem != "optimizer_state"}  # which has no tensors
    for file in by_name.values():
        whole = file.read_bytes()
        flip(file)
        refused(CheckpointError, rf"{re.escape(file.name)} cannot be read: .*Bad CRC-32", imported, tmp_path / "in")
        file.write_bytes(whole)
    check_nothing_is_left(tmp_path / "imported")
    imported(tmp_path / "in")


@pytest.mark.parametrize("form", ["no zip file", "no checksums"])
def test_files_without_checksums_are_told(tmp_path, form: str) -> None:
    trained = make_trained(0)
    path = write_sharded(tmp_path / "in", trained, 2, 2)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(form == "no zip file")
    change(path, SECOND, lambda it: it, _use_new_zipfile_serialization=form != "no zip file")
    torch.serialization.set_crc32_options(before)
    with pytest.warns(RuntimeWarning, match=f"{SECOND} was saved without checksums, as 1 of 3 files"):
        imported(tmp_path / "in")
    check_bits(tmp_path / "imported", trained, torch.float32)


def test_what_a_killed_import_has_left_is_removed_by_the_next(tmp_path) -> None:
    """And what another one is at work on stays."""
    write_sharded(tmp_path / "in", make_trained(0), 1, 1)

    def killed() -> None:
        import_checkpoint(tmp_path / "in", tmp_path / "imported", read=lambda *_: os._exit(9))

    assert exit_code(fork(killed)) == 9
    (left,) = (path.name for path in (tmp_path / "imported").iterdir() if path.name != ".lock")
    names: list[set[str]] = []

    def read(files: Sequence[Path], folder: Path) -> list[object]:
        if len(names) < 2:
            names.append({path.name for path in folder.parents[1].iterdir()} - {".lock"})
            import_checkpoint(tmp_path / "in", tmp_path / "imported", read=read)
        return read_here(files, folder)

    import_checkpoint(tmp_path / "in", tmp_path / "imported", read=read)
    first, second = names
    assert left not in first
    assert first < second
    assert {path.name for path in (tmp_path / "imported").iterdir()} == {".lock", "global_step4", "latest"}


def test_stage_3_needs_every_model_file(tmp_path) -> None:
    path = write_sharded(tmp_path / "in", make_trained(0), 3, 3)
    remove(path, "zero_pp_rank_2_mp_rank_00_model_states.pt")
    refused(CheckpointError, "model files of 2 ranks and optimizer files of 3", imported, tmp_path / "in")


def test_stage_3_has_one_dtype_of_a_parameter(tmp_path) -> None:
    """Nothing but the dtype is taken from its placeholder."""
    path = write_sharded(tmp_path / "in", make_trained(0), 3, 2, torch.bfloat16)
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    for dtype, message in (
        (torch.float32, "has up.bias in torch.bfloat16, .* in torch.float32"),
        (torch.int64, "int64"),
    ):
        change(path, name, lambda it, dtype=dtype: it["module"].update({"up.bias": torch.empty(0, dtype=dtype)}))
        refused(CheckpointError, message, imported, tmp_path / "in")
    change(path, name.replace("rank_0", "rank_1", 1), lambda it: it["module"].update({"up.bias": torch.tensor([3])}))
    refused(CheckpointError, "up.bias, which was trained, in whole numbers", imported, tmp_path / "in")


@pytest.mark.parametrize(
    ("version", "dtype", "value", "refused"),
    [
        ("0.18.2", torch.float16, 1024.0, False),
        ("0.18.3", torch.float16, 1024.0, True),
        ("0.19.8 ", torch.float16, 0.0, True),
        ("0.19.9", torch.float16, 1024.0, False),
        ("0.19.3", torch.float16, 1.0, False),
        ("0.18.5+abc", torch.bfloat16, 65536.0, True),
        ("0.18.6", torch.bfloat16, 65536.0, False),
        ("unknown", torch.float16, 1024.0, False),
    ],
)
def test_moments_of_gradients_that_a_release_has_divided(tmp_path, version, dtype, value, refused) -> None:
    """By a loss scale which no loss was multiplied by, at stage 0."""
    trained = make_trained(32)
    write_unsharded(tmp_path / "in", trained, dtype, version=version, scale=FIXED_SCALE | {"cur_scale": value})
    if not refused:
        assert imported(tmp_path / "in").optimizer == "AdamW"
        return check_bits(tmp_path / "imported", trained, dtype)
    number = re.match(r"[\d.]+", version)
    with pytest.raises(CheckpointError, match=rf"{number[0]} divided the gradients.*{value:g}.*--weights-only"):
        imported(tmp_path / "in")
    assert imported(tmp_path / "in", weights_only=True).optimizer is None
    return None


def test_universal_files_that_are_missing_or_joined(tmp_path) -> None:
    path = write_universal(tmp_path / "in", make_trained(0), 1)
    joined = path / "zero" / "up.weight" / "exp_avg.pt"
    torch.save({"param": torch.ones(13, 5), "cat_dim": 0, "vocab_tensor": True}, joined)
    with pytest.raises(CheckpointError, match=r"exp_avg\.pt was put together from parts of tensors \(vocab_tensor\)"):
        imported(tmp_path / "in")
    torch.save(torch.ones(3), joined)
    refused(CheckpointError, r"exp_avg\.pt holds \(3,\), a tensor of 65 values was expected", imported, tmp_path / "in")
    shutil.rmtree(path / "zero" / "up.weight")
    refused(CheckpointError, r"up\.weight.fp32\.pt is missing", imported, tmp_path / "in")


def test_tags_and_folders_that_are_not_there(tmp_path) -> None:
    folder = tmp_path / "in"
    write_sharded(folder, make_trained(0), 1, 1)
    (folder / "latest").write_text("gone")
    (tmp_path / "empty").mkdir()
    for call, message in (
        (lambda: imported(folder, "nothing"), "no checkpoint 'nothing' of DeepSpeed's in .*, only global_step4"),
        (lambda: imported(folder), "'gone'.*only global_step4"),
        (lambda: imported(folder / "global_step4"), r"is one checkpoint: give .*in --tag global_step4"),
        (lambda: import_checkpoint(folder, folder, "global_step4", read=read_here), "holds the checkpoint that is imp"),
        (lambda: imported(tmp_path / "empty"), "no checkpoint of DeepSpeed's"),
    ):
        refused(UsageError, message, call)


class Trap:
    """Runs a command in whoever opens the pickle as a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_cannot_run_anything(tmp_path, capsys, warm) -> None:
    path = write_sharded(tmp_path / "in", make_trained(0), 1, 2)
    torch.save({"trap": Trap(tmp_path / "sprung")}, path / FIRST)
    output = tmp_path / "out"
    assert main(["checkpoint", "import", str(tmp_path / "in"), "--output", str(output)]) == 1
    complaint = capsys.readouterr().err
    assert f"{FIRST} cannot be read: " in complaint
    assert "posix" in complaint
    assert "weights_only" not in complaint
    assert not (tmp_path / "sprung").exists()
    check_nothing_is_left(output)


class Stranger:
    pass


@pytest.mark.parametrize(
    ("mine", "message"),
    [(Stranger(), r"it holds a \S*test_import_errors\.Stranger"), (ENDLESS, ".*nested more than 100 deep")],
)
def test_values_that_cannot_be_read(tmp_path, mine, message: str) -> None:
    write_sharded(tmp_path / "in", make_trained(0, mine=mine), 1, 1)
    refused(CheckpointError, f"{MODEL} cannot be read: {message}", imported, tmp_path / "in")


def test_client_state_is_kept_or_named(tmp_path) -> None:
    generator = random.Random(0)
    state = {
        "loss": np.float64(0.25),
        "generator": np.random.RandomState(3).get_state(),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "python": generator.getstate(),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        "best": torch.arange(3, dtype=torch.bfloat16),
        "kinds": {torch.float16: 1},
        "numbered": {1: [2, {3: None}]},
    }
    write_sharded(tmp_path / "in", make_trained(0, **state), 2, 2)
    notes = imported(tmp_path / "in").notes
    assert len(notes) == 1
    assert notes[0].startswith("left out: client_state['kinds'] has the key")
    with CheckpointStore(tmp_path / "imported", threads.single(10.0)).load() as found:
        tensors = {key: found.read_rank(key, 0) for key in found.manifest.files[0].rank_tensors}
        engine_state = unpack_client_state(found.shared, tensors.__getitem__)
    assert engine_state["loss"] == 0.25
    assert engine_state["epoch"] == 3
    kind, keys, position, *_ = engine_state["generator"]
    assert (kind, position) == ("MT19937", state["generator"][2])
    assert np.array_equal(keys.numpy(), state["generator"][1])
    assert engine_state["columns"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert engine_state["python"] == generator.getstate()
    assert engine_state["args"] == {"lr": 0.1, "betas": (0.9, 0.99)}
    assert torch.equal(engine_state["best"], state["best"])
    assert engine_state["numbered"] == state["numbered"]


def test_the_command(tmp_path, capsys, warm) -> None:
    write_sharded(tmp_path / "in", make_trained(0), 3, 2, torch.bfloat16)
    assert main(["checkpoint", "import", str(tmp_path / "in")]) == 0
    output = tmp_path / "in-thinwire"
    assert capsys.readouterr().out == f"{output / 'global_step4'}: 8 parameters, the state of AdamW\n"
    assert main(["checkpoint", "verify", str(output)]) == 0
    assert main(["checkpoint", "import", str(tmp_path / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(tmp_path / "in"), "--tag", "x"]) == 2
    assert sorted(path.name for path in output.iterdir()) == [".lock", "global_step4", "latest"]
