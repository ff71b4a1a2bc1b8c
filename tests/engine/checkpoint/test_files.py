"""What was saved is what is read, bit for bit, however it was cut and by however many ranks; exported weights are those
of the model, for Hugging Face, for safetensors and for plain torch."""

import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from tests.engine.checkpoint.jobs import Values, alone, load, missing, opened, same, save
from tests.launching import on_threads
from tests.refusing import refused
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.exporting import export_weights
from thinwire.engine.checkpoint.files import CODES, write_tensors
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), saved_by=st.integers(1, 5), loaded_by=st.integers(1, 4))
def test_any_number_of_ranks_reads_what_any_other_saved(seed: int, saved_by: int, loaded_by: int) -> None:
    values = Values(seed, saved_by)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), ("step-1", values))
        assert load(Path(folder), values, loaded_by) == []


@settings(max_examples=20)
@given(
    shapes=st.dictionaries(st.text(min_size=1, max_size=5), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    seed=st.integers(0, 1 << 30),
)
def test_any_model(shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    values = Values(seed, 2, shapes)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), ("any", values))
        assert load(Path(folder), values) == []


def test_what_no_rank_saved_is_a_key_error(tmp_path: Path) -> None:
    save(tmp_path, ("x", Values(5, 2)))
    checkpoint = opened(tmp_path)
    assert same(checkpoint.read("weight", "empty", 0, 0), torch.empty(0, dtype=torch.bfloat16))  # that no rank owns
    for kind, name, start, numel in (
        ("exp_avg", "empty", 0, 0),
        ("exp_avg_sq", "bias", 0, 1),
        ("weight", "nothing", 0, 1),
        ("weight", "bias", 0, 2),
        ("weight", "bias", -1, 1),
    ):
        refused(KeyError, name, checkpoint.read, kind, name, start, numel)
    refused(KeyError, "momentum", checkpoint.read_rank, "momentum", 0)
    refused(KeyError, "2 ranks", checkpoint.read_rank, "residual", 2)
    refused(KeyError, "rank -1", checkpoint.rank_values, -1)


def test_what_is_read_is_no_view_of_the_file(tmp_path: Path) -> None:
    values = Values(6, 1)
    save(tmp_path, ("x", values))
    checkpoint = opened(tmp_path)
    for tensor in (checkpoint.read("master", "embedding", 0, 85), *checkpoint.buffers().values()):
        tensor.zero_()
    values.check(checkpoint)
    checkpoint.close()
    refused(CheckpointError, "was closed", checkpoint.read, "master", "embedding", 0, 85)


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


@on_threads(3)
def test_no_values_at_all(comm: Communicator, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, comm)
    assert store.save("none", Snapshot([], ModelDescription({})))
    checkpoint = store.load(description=ModelDescription({})) or missing()
    assert checkpoint.kinds() == set()
    assert checkpoint.buffers() == {}


def test_json_values_come_back(tmp_path: Path) -> None:
    shared = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.999]}, "text": "ü\n\ud800", "1": None, "big": 1 << 80}
    assert alone(tmp_path).save("x", Snapshot([], ModelDescription({}), shared=shared))
    assert opened(tmp_path).shared == shared
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


class TiedModel(nn.Module):
    """An embedding whose weight is its head's, and a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.normalisation = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.normalisation.weight)
        self.normalisation.running_mean = torch.randn(6)


def save_model(folder: Path, model: nn.Module, size: int, tied: dict[str, str], master_weights: bool = False) -> None:
    """Save a model's values, every parameter cut in `size` runs; with master weights, the weights are in bfloat16."""
    weight_dtype = torch.bfloat16 if master_weights else torch.float32
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    description = ModelDescription.of((name, one.to(weight_dtype)) for name, one in parameters.items())
    kinds = {"weight": weight_dtype} | ({"master": torch.float32} if master_weights else {})

    def work(comm: Communicator) -> None:
        slices = []
        for name, parameter in parameters.items():
            low, high = (parameter.numel() * part // size for part in (comm.rank, comm.rank + 1))
            run = parameter.flatten()[low:high]
            slices += [SavedSlice(kind, name, low, run.to(dtype)) for kind, dtype in kinds.items()]
        snapshot = Snapshot(slices, description, shared={"tied": tied}, buffers=dict(model.named_buffers()))
        assert CheckpointStore(folder, comm).save("step-1", snapshot)

    threads.run(work, size)


def export(folder: Path, output: Path, dtype: torch.dtype | None = None, tied: bool = False) -> Path:
    with opened(folder) as checkpoint:
        return export_weights(checkpoint, output, dtype, tied=tied)


TIED = {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("master_weights", [False, True])
def test_safetensors_loads_a_tied_model(tmp_path: Path, master_weights: bool) -> None:
    model, other = TiedModel(), TiedModel()
    save_model(tmp_path / "in", model, 3, TIED, master_weights)
    path = export(tmp_path / "in", tmp_path / "out")
    assert load_model(other, path) == (set(), [])
    assert other.head.weight is other.embedding.weight
    for name, tensor in model.state_dict().items():
        assert same(other.state_dict()[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == model.state_dict().keys() - TIED.keys()


def test_tied_writes_every_name_for_a_strict_load(tmp_path: Path) -> None:
    model, other = TiedModel(), TiedModel()
    save_model(tmp_path / "in", model, 2, TIED)
    other.load_state_dict(load_file(export(tmp_path / "in", tmp_path / "out", tied=True)), strict=True)
    assert all(same(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floating_point_values_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    model = TiedModel()
    save_model(tmp_path / "in", model, 2, TIED, master_weights=True)
    exported = load_file(export(tmp_path / "in", tmp_path / "out", dtype))
    for name, tensor in exported.items():
        mine = model.state_dict()[name]
        assert same(tensor, mine.to(dtype) if mine.is_floating_point() else mine)


def test_without_masters_weights_keep_their_dtype_and_empty_parameters_their_shape(tmp_path: Path) -> None:
    values = Values(4, 3, kinds={"weight": torch.float16, "exp_avg": torch.float32})
    save(tmp_path / "in", ("x", values))
    exported = load_file(export(tmp_path / "in", tmp_path / "out"))
    assert exported.keys() == values.shapes.keys() | values.buffers.keys()
    for name, shape in values.shapes.items():
        assert same(exported[name], values.flat["weight", name].view(shape))


def test_a_failed_export_leaves_the_one_before(tmp_path: Path) -> None:
    save_model(tmp_path / "in", TiedModel(), 1, TIED)
    before = export(tmp_path / "in", tmp_path / "out").read_bytes()
    checkpoint = opened(tmp_path / "in")
    with checkpoint, pytest.raises(FileNotFoundError):
        export_weights(checkpoint, tmp_path / "out", torch.float16, config=tmp_path / "no such file")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_hugging_face_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=37, max_position_embeddings=20, **sizes)
    model = transformers.BertForMaskedLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    save_model(tmp_path / "in", model, 3, {}, master_weights=True)
    with opened(tmp_path / "in") as checkpoint:
        export_weights(checkpoint, tmp_path / "out", config=tmp_path / "config" / "config.json")
    other, report = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert same(other.state_dict()[name], tensor), name
    tokens = torch.randint(0, 37, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other.eval()(tokens).logits)
