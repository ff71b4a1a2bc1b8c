"""Models by name and by configuration have the parameters of Hugging Face's classes; low rank is torch's; activations
are the paper's."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from experiments.tasks.models import build_bert
from experiments.tasks.sizes import SIZES as BERT_SIZES
from tests.refusing import refused
from thinwire.plan import Activations, Matrices, PlanError, named_model, plain_model
from thinwire.plan.models import FAMILIES, MODELS, built_model, model_of

# Parameters as counted in the published weights, the head that is trained included.
PUBLISHED = {
    "bert-base-uncased": 109_514_298,
    "roberta-base": 124_697_433,
    "distilbert-base-uncased": 66_985_530,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
    "pythia-160m": 162_322_944,
    "pythia-1.4b": 1_414_647_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "t5-small": 60_506_624,
    "t5-large": 737_668_096,
    "flan-t5-base": 247_577_856,
    "vit-base-patch16-224": 86_567_656,
    "vit-large-patch16-224": 304_326_632,
}

CLASSES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
# Small, and unlike every family's defaults.
SIZES = {
    "vocab_size": 77,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
OF_FAMILY = {
    "distilbert": {"vocab_size": 77, "dim": 48, "hidden_dim": 100, "n_layers": 3, "n_heads": 4},
    "gpt2": {"vocab_size": 77, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 96},
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    **{family: LLAMA for family in ("mistral", "qwen2", "qwen3", "gemma")},
    "t5": {"vocab_size": 77, "d_model": 48, "d_kv": 8, "d_ff": 100, "num_heads": 4, "num_layers": 3}
    | {"num_decoder_layers": 2},
    "vit": {**SIZES, "image_size": 32, "patch_size": 8, "num_channels": 1},
}


def held(name: str, configuration: transformers.PreTrainedConfig) -> tuple[int, list[int]]:
    """Parameters that the class itself holds, and those of each of its matrices."""
    with torch.device("meta"):
        model = getattr(transformers, name)(configuration)
    shapes = [one.shape for one in model.parameters()]
    numels = [shape.numel() for shape in shapes]
    return sum(numels), sorted(shape.numel() for shape in shapes if len(shape) == 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_are_the_classes(family: str) -> None:
    configuration = transformers.AutoConfig.for_model(family, **OF_FAMILY.get(family, SIZES))
    parameters, matrices = held(CLASSES[family], configuration)
    found = model_of("it", json.loads(configuration.to_json_string()))
    assert found.parameters == parameters
    # A convolution over patches and ViT's positions are stored with more dimensions.
    ours = sorted(one.rows * one.columns for one in found.matrices for _ in range(one.count))
    assert ours == matrices or family == "vit"
    assert found.blocks is not None
    assert found.last_elements == (48 * 64 if family == "vit" else 77 * 48)


def test_flan_has_a_gate_and_a_head() -> None:
    sizes = {**OF_FAMILY["t5"], "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    configuration = transformers.AutoConfig.for_model("t5", **sizes)
    expected, _ = held(CLASSES["t5"], configuration)
    assert model_of("it", json.loads(configuration.to_json_string())).parameters == expected


def test_known_names_have_their_published_size() -> None:
    assert {name: named_model(name).parameters for name in PUBLISHED} == PUBLISHED
    assert {name: named_model(f"anyone/{name.upper()}").parameters for name in PUBLISHED} == PUBLISHED
    assert all(named_model(name).parameters > 1e6 for name in MODELS)


def write(folder: Path, **configuration: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(configuration))
    return path


def test_a_configuration_by_its_path_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mine", model_type="gpt2", **OF_FAMILY["gpt2"])
    assert named_model(str(path)) == named_model(str(path.parent))
    assert named_model(str(path)).name == "mine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # called as a model, and holds none
    assert named_model("gpt2").parameters == PUBLISHED["gpt2"]


def test_hugging_face_s_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--anyone--gpt2"
    write(folder / "snapshots" / "abc", model_type="gpt2", **OF_FAMILY["gpt2"])
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert named_model("anyone/gpt2").parameters < 1e6
    assert named_model("gpt2").parameters == PUBLISHED["gpt2"]


def test_other_families_are_built_by_transformers(tmp_path: Path) -> None:
    """Without memory for their weights, and like the formulas where there is one."""
    sizes = {**SIZES, "architectures": ["ElectraForMaskedLM"], "embedding_size": 48}
    found = named_model(str(write(tmp_path / "electra", model_type="electra", **sizes)))
    expected, matrices = held("ElectraForMaskedLM", transformers.AutoConfig.for_model("electra", **sizes))
    assert found.parameters == expected
    assert sorted(one.rows * one.columns for one in found.matrices for _ in range(one.count)) == matrices
    assert found.last_elements == 77 * 48
    assert (found.blocks.layers, found.blocks.sequence) == (3, 96)
    both = write(tmp_path / "gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"], **OF_FAMILY["gpt2"])
    assert built_model("it", both).parameters == named_model(str(both)).parameters


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is no JSON"),
        ("[]", "it has no model_type"),
        ("{}", "it has no model_type"),
        ('{"model_type": "llama"}', "hidden_size must be a whole number above 0, got None"),
        ('{"model_type": "gpt2", "n_layer": -1}', "n_layer must be a whole number above 0, got -1"),
        ('{"model_type": "gpt2", "n_layer": "many"}', "n_layer must be a whole number above 0, got 'many'"),
        ('{"model_type": "t5", "tie_word_embeddings": 3}', "tie_word_embeddings must be true or false, got 3"),
        ('{"model_type": "no such family"}', "transformers cannot build"),
        ('"' + "x" * (1 << 20) + '"', "larger than 1 MiB"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    refused(PlanError, told, named_model, str(path))


def test_an_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refused(PlanError, r"Did you mean bert-large.*340M.*hf download ORGANISATION/bert-lage", named_model, "bert-lage")
    refused(PlanError, "cannot be read: No such file", named_model, str(tmp_path / "none.json"))


def test_transformers_is_asked_for_other_families_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert named_model("bert-base").parameters == PUBLISHED["bert-base-uncased"]
    path = write(tmp_path, model_type="electra")
    with pytest.raises(PlanError, match="transformers alone, which is not installed: pip install 'thinwire\\[hf\\]'"):
        named_model(str(path))


@pytest.mark.parametrize("size", ["tiny", "mini", "small"])
def test_named_models_are_hugging_face_s(size: str) -> None:
    model = build_bert(BERT_SIZES[size], 30522, 512, 0.1, seed=0)
    named = named_model(f"bert-{size}")
    assert named.parameters == sum(one.numel() for one in model.parameters())
    two_dimensional = [one for one in model.parameters() if one.dim() == 2]
    assert sum(one.numel for one in named.matrices) == sum(one.numel() for one in two_dimensional)
    assert sum(one.count for one in named.matrices) == len(two_dimensional)
    assert named.last_elements == model.bert.embeddings.word_embeddings.weight.numel()


@pytest.mark.parametrize(("rank", "factors"), [(1, 1000 + 400), (4, 4 * 1400), (142, 142 * 1400), (143, 0), (9999, 0)])
def test_low_rank_only_where_it_halves(rank: int, factors: int) -> None:
    assert Matrices(1000, 400).low_rank_elements(rank) == factors
    assert Matrices(1000, 400, 3).low_rank_elements(rank) == 3 * factors


@pytest.mark.parametrize("parameters", [1, 2, 17, 1024**2, 10**9 + 7])
def test_a_count_alone(parameters: int) -> None:
    model = plain_model(parameters)
    assert model.parameters == parameters
    assert parameters * 0.5 <= sum(one.numel for one in model.matrices) <= parameters


def test_activations() -> None:
    """Korthikanti et al.: s·b·h·L·(34 + 5·a·s/h) in 16 bits, of which the masks, 2 + a·s/h, are bytes in any case."""
    activations = Activations(layers=24, hidden=1024, heads=16, sequence=128, micro_batch=16)
    whole = 128 * 16 * 1024 * 24 * (34 + 5 * 16 * 128 / 1024)
    masks = 128 * 16 * 1024 * 24 * (2 + 16 * 128 / 1024)
    assert activations.nbytes("bf16") == whole
    assert activations.nbytes("fp32") == 2 * whole - masks
