"""Models of Hugging Face's with sparse attention, padded to whole blocks; pickled and saved, and loaded again, here and
in a new process."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.launching import Jobs
from tests.refusing import refused
from tests.sparse_attn.test_hugging_face import batch, logits, make
from thinwire.sparse_attn import BigBird, Custom, densify, pad_to_block_size, sparsify, unpad_sequence_output

transformers = pytest.importorskip("transformers")

# Padding: what is added is never attended, whatever form the mask has


@settings(max_examples=30, deadline=None)
@given(block=st.integers(1, 70), length=st.integers(1, 150))
def test_whole_blocks_and_back(block: int, length: int) -> None:
    ids = torch.randint(5, 50, (2, length))
    pad, padded, mask, types, positions, embeds = pad_to_block_size(block, ids, pad_token_id=3)
    assert padded.shape[1] % block == 0
    assert 0 <= pad < block
    assert (padded[:, length:] == 3).all()
    assert (types, positions, embeds) == (None, None, None)
    assert (mask is None) == (pad == 0)
    assert mask is None or torch.equal(mask.sum(1), torch.tensor([length, length]))
    assert torch.equal(unpad_sequence_output(pad, padded), ids)


def padded_mask(mask: Tensor) -> Tensor:
    padded = pad_to_block_size(16, torch.randint(5, 50, (2, 10)), mask)[2]
    assert padded.dtype == mask.dtype
    assert torch.equal(padded[..., :10][..., : mask.shape[-2], :], mask)
    return padded


def test_every_form_of_mask_hides_what_was_added_or_is_refused() -> None:
    for mask in (torch.ones(2, 10, dtype=torch.int64), torch.ones(2, 1, 10, 10, dtype=torch.bool), torch.ones(2, 10)):
        assert not padded_mask(mask)[..., 10:].any()
    for shape in ((2, 1, 1, 10), (2, 1, 10, 10)):
        padded = padded_mask(torch.zeros(shape))
        assert (padded[..., 10:] == torch.finfo(torch.float32).min).all()
        assert padded.shape[-2] == (1 if shape[-2] == 1 else 16)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    for arguments, message in (
        ((16, ids, None, None, None, nn.Embedding(3, 4)(ids)), "exactly one"),
        ((16, ids, torch.ones(2, 6)), "attention_mask has shape"),
        ((0, ids), "block_size is 0"),
    ):
        refused(ValueError, message, pad_to_block_size, *arguments)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
@pytest.mark.parametrize("embeds", [False, True])
def test_a_model_says_the_same_of_padded_inputs(kind: str, embeds: bool) -> None:
    model = make(kind).base_model
    config = model.config
    first = config.pad_token_id + 1 if kind == "Roberta" else 0
    positions = torch.arange(first, first + 21)[None]
    ids, types = torch.randint(5, 50, (2, 21)), torch.randint(0, config.type_vocab_size, (2, 21))
    words = model.get_input_embeddings()
    given_ids, given_embeds = (None, words(ids)) if embeds else (ids, None)
    pad, *inputs = pad_to_block_size(
        16, given_ids, None, types, positions, given_embeds, pad_token_id=config.pad_token_id, model_embeddings=words
    )
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
    out = model(**dict(zip(names, inputs, strict=True))).last_hidden_state
    expected = model(ids, token_type_ids=types, position_ids=positions).last_hidden_state
    torch.testing.assert_close(unpad_sequence_output(pad, out), expected, atol=1e-5, rtol=1e-4)


# Saving

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
        assert "register_with_transformers()" in (tmp_path / "config.json").read_text()
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(model, inputs), sparse)
    assert torch.equal(logits(sparsify(model), inputs), sparse)
    for loaded in (model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()):
        assert torch.equal(logits(densify(loaded), inputs), own)
        assert "thinwire" not in str(loaded.config.to_dict())
    refused(ValueError, "was not saved as a sparse model", sparsify, model)


TAMPERED = {
    "": [[1], "x", True, 3],
    ".num_heads": [None, "4", 1.5, [], {}, -1, 10**30, ...],
    ".layout": [None, True, "fixed", [], [1], {}],
    ".layout.mode": [None, 3, [], {"a": 1}, "gone", ...],
    ".layout.block": [None, 10**30, "16", [16], 17],
    ".layout.attention": [None, 1, ["unidirectional"], {}],
    ".layout.num_random_blocks": [None, -1, "1", [], {}, 1.0, True],
    ".dense_attention": [None, 1, ["sdpa"], {}],
}


@pytest.mark.parametrize("place", TAMPERED)
def test_a_saved_layout_that_was_edited_is_refused_by_name(tmp_path: Path, place: str) -> None:
    """`...` takes the value out."""
    model, inputs = make("GPT2"), batch(112)
    sparsify(model, BigBird(4, attention="unidirectional")).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    keys = f"thinwire_sparse_attention{place}".split(".")
    for value in TAMPERED[place]:
        edited = copy.deepcopy(described)
        inner = edited
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        if value is ...:
            del inner[keys[-1]]
        (tmp_path / "config.json").write_text(json.dumps(edited))
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        for call in (sparsify, densify, lambda model: logits(model, inputs)):
            refused(ValueError, keys[-1], call, loaded)


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
    refused(ValueError, "has no layout", logits, loaded, inputs)
    assert torch.equal(logits(sparsify(loaded, layout), inputs), own)
