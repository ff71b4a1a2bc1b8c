"""What was saved is what is read, bit for bit, however it was cut and by however many ranks."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.engine.checkpoint.jobs import Values, load, missing, same, save
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.files import CODES, write_tensors
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), saved_by=st.integers(1, 5), loaded_by=st.integers(1, 4))
def test_any_number_of_ranks_reads_what_any_other_saved(seed: int, saved_by: int, loaded_by: int) -> None:
    values = Values(seed, saved_by)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), ("step-1", values))
        assert load(Path(folder), values, loaded_by) == []


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.dictionaries(st.text(min_size=1, max_size=5), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    seed=st.integers(0, 1 << 30),
)
def test_any_model(shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    values = Values(seed, 2, shapes)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), ("any", values))
        assert load(Path(folder), values) == []


def test_an_empty_parameter_has_weights_though_nobody_owns_any(tmp_path: Path) -> None:
    values = Values(5, 2)
    save(tmp_path, ("x", values))
    checkpoint = CheckpointStore(tmp_path, threads.single(10.0)).load() or missing()
    assert same(checkpoint.read("weight", "empty", 0, 0), torch.empty(0, dtype=torch.bfloat16))
    with pytest.raises(KeyError):
        checkpoint.read("exp_avg", "empty", 0, 0)


@pytest.mark.parametrize(
    ("kind", "name", "start", "numel"),
    [("exp_avg_sq", "bias", 0, 1), ("weight", "nothing", 0, 1), ("weight", "bias", 0, 2), ("weight", "bias", -1, 1)],
)
def test_what_nobody_saved_is_a_key_error(tmp_path: Path, kind: str, name: str, start: int, numel: int) -> None:
    save(tmp_path, ("x", Values(5, 2)))
    checkpoint = CheckpointStore(tmp_path, threads.single(10.0)).load() or missing()
    with pytest.raises(KeyError, match=name):
        checkpoint.read(kind, name, start, numel)
    with pytest.raises(KeyError, match="momentum"):
        checkpoint.read_rank("momentum", 0)
    with pytest.raises(KeyError, match="2 ranks"):
        checkpoint.read_rank("residual", 2)
    with pytest.raises(KeyError, match="rank -1"):
        checkpoint.rank_values(-1)


def test_what_is_read_is_no_view_of_the_file(tmp_path: Path) -> None:
    values = Values(6, 1)
    save(tmp_path, ("x", values))
    checkpoint = CheckpointStore(tmp_path, threads.single(10.0)).load() or missing()
    for tensor in (checkpoint.read("master", "embedding", 0, 85), *checkpoint.buffers().values()):
        tensor.zero_()
    values.check(checkpoint)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.read("master", "embedding", 0, 85)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_is_read_by_safetensors_itself(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dtype.itemsize)
    raw = torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensors = {
        "matrix": raw.view(dtype),
        "strided": raw.view(dtype).t(),
        "one": raw.view(dtype)[1, :1],
        "scalar": raw.view(dtype)[2, 3],
        "empty": raw.view(dtype)[:, :0],
        "odd bytes": torch.arange(7, dtype=torch.uint8),
    }
    size, _ = write_tensors(tmp_path / "x", tensors)
    assert (tmp_path / "x").stat().st_size == size
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    assert all(same(read[key], tensor.contiguous()) for key, tensor in tensors.items())


def test_no_values_at_all(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        store = CheckpointStore(tmp_path, comm)
        assert store.save("none", Snapshot([], ModelDescription({})))
        checkpoint = store.load(description=ModelDescription({})) or missing()
        assert checkpoint.kinds() == set()
        assert checkpoint.buffers() == {}

    threads.run(work, 3)


def test_json_values_come_back(tmp_path: Path) -> None:
    shared = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.999]}, "text": "ü\n\ud800", "1": None, "big": 1 << 80}
    store = CheckpointStore(tmp_path, threads.single(10.0))
    assert store.save("x", Snapshot([], ModelDescription({}), shared=shared))
    assert (store.load() or missing()).shared == shared
    assert json.loads((tmp_path / "x" / "manifest.json").read_text())["shared"] == shared


def test_a_checkpoint_is_found_through_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = Values(8, 1)
    monkeypatch.chdir(tmp_path)
    save(Path("runs/first"), ("x", values))
    (tmp_path / "moved").mkdir()
    (tmp_path / "runs" / "first").rename(tmp_path / "moved" / "there")
    assert load(tmp_path / "moved" / "there", values) == []


def test_an_empty_slice_is_harmless(tmp_path: Path) -> None:
    model = ModelDescription({"w": ((6,), torch.float32)})
    cut = random.Random(0).randrange(1, 6)
    flat = torch.arange(6.0)
    first = [SavedSlice("weight", "w", 0, flat[:cut]), SavedSlice("weight", "w", cut, flat[:0])]
    slices = [first, [SavedSlice("weight", "w", cut, flat[cut:])]]

    def work(comm: Communicator) -> None:
        store = CheckpointStore(tmp_path, comm)
        assert store.save("x", Snapshot(slices[comm.rank], model))
        assert torch.equal((store.load() or missing()).read("weight", "w", 0, 6), flat)

    threads.run(work, 2)
