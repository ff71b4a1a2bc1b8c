"""Pickles are refused by name, wherever they are offered, and never loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.pickles import is_pickle
from thinwire.engine.checkpoint.store import CheckpointStore
from thinwire.engine.errors import CheckpointError


class Bomb:
    """Would end the test if it were ever loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was loaded')",)


def write_bomb(path: Path, how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "bare":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), path, _use_new_zipfile_serialization=how == "zip")


@pytest.mark.parametrize("how", ["zip", "legacy", "bare"])
@pytest.mark.parametrize("name", ["model_states.pt", "pytorch_model.bin", "state"])
def test_a_folder_of_pickles_is_refused_on_every_rank(tmp_path: Path, name: str, how: str) -> None:
    write_bomb(tmp_path / "global_step10" / name, how)
    (tmp_path / "latest").write_text("global_step10")

    def work(comm: Communicator) -> None:
        for folder, tag in ((tmp_path, None), (tmp_path, "global_step10"), (tmp_path / "global_step10", None)):
            with pytest.raises(CheckpointError, match=rf"{name} is a pickle.* safetensors.torch.save_model"):
                CheckpointStore(folder, comm).load(tag)

    threads.run(work, 2)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_deepspeeds_files_are_refused_with_the_command_that_imports_them(tmp_path: Path, name: str) -> None:
    write_bomb(tmp_path / "global_step10" / name, "zip")
    comm = threads.single(10.0)
    tag = " --tag global_step10"
    for folder, given, options in (
        (tmp_path, None, ""),
        (tmp_path, "global_step10", tag),
        (tmp_path / "global_step10", None, tag),
    ):
        with pytest.raises(CheckpointError, match=rf"`thinwire checkpoint import {tmp_path}{options}`"):
            CheckpointStore(folder, comm).load(given)


@pytest.mark.parametrize("name", ["checkpoint.pt", "weights.ckpt", "bytes"])
def test_a_pickle_offered_as_the_folder_or_the_tag_is_refused(tmp_path: Path, name: str) -> None:
    write_bomb(tmp_path / name, "zip")
    comm = threads.single(10.0)
    with pytest.raises(CheckpointError, match="a pickle"):
        CheckpointStore(tmp_path / name, comm).load()
    with pytest.raises(CheckpointError, match="a pickle"):
        CheckpointStore(tmp_path, comm).load(name)


def test_other_files_are_not_taken_for_pickles(tmp_path: Path) -> None:
    # The sizes make headers whose length starts like a pickle does.
    for tensors in range(1, 60):
        save_file({f"tensor {number}": torch.zeros(1) for number in range(tensors)}, tmp_path / "tensors")
        assert not is_pickle(tmp_path / "tensors")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("step-1")
    for name in ("empty", "text", "nothing"):
        assert not is_pickle(tmp_path / name)
