"""`init_inference` answers as the model that it is given, by DeepSpeed's options, and refuses what it cannot follow."""

import json

import pytest
import torch

import thinwire.deepspeed as deepspeed
from tests.refusing import refused

transformers = pytest.importorskip("transformers")


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "n_positions": 48, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


def test_a_decoder_in_a_pipeline_gives_the_same_tokens() -> None:
    tokens = torch.randint(3, 90, (2, 9))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = gpt2().generate(tokens, **options)
    model = gpt2()
    engine = deepspeed.init_inference(model, dtype="fp32", max_tokens=9, replace_with_kernel_inject=True)
    assert engine.module is model
    assert engine.config is model.config
    assert engine.can_generate()
    assert torch.equal(engine.generate(tokens, **options), expected)
    assert torch.equal(engine(tokens).logits, model(tokens).logits)
    refused(RuntimeError, "prompt has 10 tokens, and max_out_tokens is 9", engine.generate, tokens.new_ones(1, 10))
    refused(AssertionError, "profile_model_time", engine.model_times)
    engine.profile_model_time()
    engine(tokens), engine(tokens)
    assert len(engine.model_times()) == 2
    assert engine.model_times() == []


@pytest.mark.parametrize(("dtype", "weights"), [(None, torch.float16), ("bf16", torch.bfloat16), ("int8", None)])
def test_dtypes(dtype, weights) -> None:
    tokens = torch.randint(3, 90, (2, 9))
    exact = gpt2()(tokens).logits
    engine = deepspeed.init_inference(gpt2(), **({} if dtype is None else {"dtype": dtype}))
    torch.testing.assert_close(engine(tokens).logits.float(), exact, rtol=0.05, atol=0.05)
    linear = engine.module.transformer.h[0].mlp.c_fc
    assert type(linear).__name__ == "Int8Linear" if weights is None else linear.weight.dtype == weights


def test_options_come_from_a_file_a_dict_and_the_call(tmp_path) -> None:
    file = tmp_path / "inference.json"
    file.write_text(json.dumps({"kernel_inject": True, "dtype": "torch.float32", "moe": False}))
    settings = deepspeed.init_inference(torch.nn.Module(), config=file, tp={"enabled": True, "tp_size": 1})._config
    assert isinstance(settings, deepspeed.inference.config.DeepSpeedInferenceConfig)
    assert settings.replace_with_kernel_inject
    assert settings.dtype == torch.float32
    assert settings.ranks == 1
    given = {"dtype": torch.float32}
    deepspeed.init_inference(torch.nn.Module(), config=given, dtype=torch.float32)
    shared = deepspeed.inference.config.DeepSpeedTPConfig(enabled=False, tp_size=2)
    assert deepspeed.init_inference(torch.nn.Module(), given, tensor_parallel=shared)._config.ranks == 1
    for changes in ({"kernel_inject": True}, {"injection_policy": {torch.nn.Linear: ("output",)}}):
        deepspeed.init_inference(torch.nn.Module(), given, keep_module_on_host=True, **changes)
    assert deepspeed.inference.config.DeepSpeedInferenceConfig(mp_size=2).tensor_parallel.tp_size == 2
    refused(ValueError, "takes a torch.nn.Module, got str", deepspeed.init_inference, "gpt2")
    refused(
        ValueError, "'dtype'.*float32.*float16", deepspeed.init_inference, torch.nn.Module(), given, dtype=torch.half
    )


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"checkpoint": "model.json"}, deepspeed.NotOfferedError, "takes no checkpoint.*before the call"),
        ({"zero": {"stage": 3}}, deepspeed.NotOfferedError, "tensor_parallel"),
        ({"dtype": "fp4"}, ValueError, "expected one of"),
        ({"dtypes": torch.float32}, ValueError, "dtypes"),
        ({"keep_module_on_host": True}, AssertionError, "requires an injection policy, kernel injection, or AutoTP"),
        ({"mp_size": 3, "dtype": torch.float32}, ValueError, "tensor_parallel=3"),
    ],
)
def test_what_cannot_be_followed(options, error, says) -> None:
    refused(error, says, deepspeed.init_inference, torch.nn.Linear(2, 2), **options)
