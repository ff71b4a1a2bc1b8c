"""A sparse model stays one: pickled, or through save_pretrained and from_pretrained, here and in a new process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launching import Jobs
from tests.sparse_attn.hugging_face.test_sparsify import batch, logits, make
from thinwire.sparse_attn import BigBird, Custom, densify, sparsify

transformers = pytest.importorskip("transformers")

IN_A_NEW_PROCESS = """
import sys, torch, transformers
folder, ids = sys.argv[1], torch.arange(112)[None] % 50
try:
    transformers.BertForMaskedLM.from_pretrained(folder + "/saved")
except ValueError as error:
    assert "thinwire" in str(error)
else:
    raise AssertionError("loaded as a dense model, without a word")
from thinwire.sparse_attn import register_with_transformers
register_with_transformers()
loaded = transformers.BertForMaskedLM.from_pretrained(folder + "/saved").eval()
pickled = torch.load(folder + "/model.pt", weights_only=False)
expected = torch.load(folder + "/logits.pt")
print([torch.equal(model(ids).logits, expected) for model in (loaded, pickled)])
"""


def test_a_model_wakes_in_a_new_process(jobs: Jobs, tmp_path: Path) -> None:
    model, ids = sparsify(make("Bert"), BigBird(4)), torch.arange(112)[None] % 50
    model.save_pretrained(tmp_path / "saved")
    torch.save(model, tmp_path / "model.pt")
    torch.save(model(ids).logits, tmp_path / "logits.pt")
    (tmp_path / "program.py").write_text(IN_A_NEW_PROCESS)
    done = jobs.alone(str(tmp_path / "program.py"), str(tmp_path))
    assert done.stdout == "[True, True]\n", done.stderr


def test_saved_and_loaded_again_and_again(tmp_path: Path) -> None:
    model, inputs = make("GPT2"), batch(112)
    own = logits(model, inputs)
    layout = BigBird(4, attention="unidirectional", seed=3)
    sparse = logits(sparsify(model, layout), inputs)
    for _ in range(2):
        model.save_pretrained(tmp_path)
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(model, inputs), sparse)
    assert torch.equal(logits(sparsify(model), inputs), sparse)
    for loaded in (model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()):
        assert torch.equal(logits(densify(loaded), inputs), own)
        assert "thinwire" not in str(loaded.config.to_dict())
    with pytest.raises(ValueError, match="was not saved as a sparse model"):
        sparsify(model)


def test_lengthened_positions_are_loaded(tmp_path: Path) -> None:
    model, inputs = make("Bert"), batch(200)
    own = logits(sparsify(model, BigBird(4), max_positions=200), inputs)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.BertForMaskedLM.from_pretrained(tmp_path).eval(), inputs), own)


def test_a_layout_that_no_configuration_holds_is_asked_for(tmp_path: Path) -> None:
    model, inputs = make("Bert"), batch(32)
    layout = Custom(torch.ones(2, 2, dtype=torch.bool).expand(4, 2, 2))
    own = logits(sparsify(model, layout), inputs)
    model.save_pretrained(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="has no layout"):
        logits(loaded, inputs)
    assert torch.equal(logits(sparsify(loaded, layout), inputs), own)
