"""The exported weights are those of the model, for Hugging Face, for safetensors and for plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from tests.engine.checkpoint.jobs import Values, missing, same, save
from thinwire.comm import Communicator, threads
from thinwire.engine.checkpoint.exporting import export_weights
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.zero import SavedSlice


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


def save_model(folder: Path, model: nn.Module, size: int, tied: dict[str, str], masters: bool = False) -> None:
    """Save a model's values, every parameter cut in `size` runs; with masters, the weights are rounded to bfloat16."""
    weight_dtype = torch.bfloat16 if masters else torch.float32
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    description = ModelDescription.of((name, one.to(weight_dtype)) for name, one in parameters.items())
    kinds = {"weight": weight_dtype} | ({"master": torch.float32} if masters else {})

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
    with CheckpointStore(folder, threads.single(10.0)).load() or missing() as checkpoint:
        return export_weights(checkpoint, output, dtype, tied=tied)


TIED = {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("masters", [False, True])
def test_safetensors_loads_a_tied_model(tmp_path: Path, masters: bool) -> None:
    model, other = TiedModel(), TiedModel()
    save_model(tmp_path / "in", model, 3, TIED, masters)
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
    save_model(tmp_path / "in", model, 2, TIED, masters=True)
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
    checkpoint = CheckpointStore(tmp_path / "in", threads.single(10.0)).load() or missing()
    with checkpoint, pytest.raises(FileNotFoundError):
        export_weights(checkpoint, tmp_path / "out", torch.float16, config=tmp_path / "no such file")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_hugging_face_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    model = transformers.BertForMaskedLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    save_model(tmp_path / "in", model, 3, {}, masters=True)
    with CheckpointStore(tmp_path / "in", threads.single(10.0)).load() or missing() as checkpoint:
        export_weights(checkpoint, tmp_path / "out", config=tmp_path / "config" / "config.json")
    other, report = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    for name, tensor in model.state_dict().items():
        assert same(other.state_dict()[name], tensor), name
    tokens = torch.randint(0, 37, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other.eval()(tokens).logits)
