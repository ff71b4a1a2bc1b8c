"""Prepared models answer as the plain ones, in 8 bits nearly so; queues answer every request once, whatever happens."""

import threading

import pytest
import torch
from torch import nn

from tests.refusing import refused
from thinwire.inference import QueueClosedError, QueueFullError, prepare
from thinwire.inference.preparation import growing_cache
from thinwire.inference.quantized import Int8Linear, WeightOnlyLinear

transformers = pytest.importorskip("transformers")


def bert(head="BertForSequenceClassification", **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 256} | more
    config = transformers.BertConfig(vocab_size=90, max_position_embeddings=48, **sizes)
    return getattr(transformers, head)(config).eval()


def requests(count, longest=48):
    random = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest + 1, (count,), generator=random).tolist()
    return [torch.randint(5, 90, (length,), generator=random) for length in lengths]


def alone(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens[None])


@pytest.mark.parametrize("quantize", [None, "int8-dynamic"])
def test_a_queue_answers_as_the_model_would_alone(quantize) -> None:
    plain = bert()
    before = {name: one.clone() for name, one in plain.state_dict().items()}
    asked = requests(40)
    with prepare(plain, quantize=quantize).queue(max_tokens=128, wait=0.0) as queue:
        answers = [queue.submit(tokens if number % 2 else tokens.tolist()) for number, tokens in enumerate(asked)]
    for tokens, answer in zip(asked, answers, strict=True):
        exact = alone(plain, tokens).logits[0]
        tolerance = {} if quantize is None else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(answer.result(timeout=0)["logits"], exact, **tolerance)
    assert all(torch.equal(before[name], one) for name, one in plain.state_dict().items())


def test_outputs_of_tokens_have_the_length_of_their_request() -> None:
    plain = bert("BertForMaskedLM")
    asked = requests(6)
    with prepare(plain).queue() as queue:
        found = [answer.result(timeout=60)["logits"] for answer in map(queue.submit, asked)]
    for tokens, logits in zip(asked, found, strict=True):
        torch.testing.assert_close(logits, alone(plain, tokens).logits[0])


@pytest.mark.parametrize("rows", [1, 7])
def test_linear_layers_in_8_bits(rows) -> None:
    """Against float64, to what levels of weights and inputs allow."""
    torch.manual_seed(rows)
    layer, inputs = nn.Linear(96, 80), torch.randn(96, rows, 2).permute(2, 1, 0)
    exact = (inputs.double() @ layer.weight.double().T + layer.bias.double()).float()
    found = Int8Linear(layer.weight, layer.bias)(inputs)
    assert found.shape == exact.shape
    assert (found - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize(("bits", "loss"), [(8, 0.01), (4, 0.09)])
def test_weights_alone_in_fewer_bits(bits, loss) -> None:
    torch.manual_seed(bits)
    layer, inputs = nn.Linear(128, 80).bfloat16(), torch.randn(128, 5, 2).bfloat16().permute(2, 1, 0)
    with torch.no_grad():
        layer.weight[3] = 0.25  # a row without spread
        exact = (inputs.double() @ layer.weight.double().T + layer.bias.double()).bfloat16()
        found = WeightOnlyLinear(layer.weight, layer.bias, bits)(inputs)
    assert found.shape == exact.shape
    assert (found - exact).norm() < loss * exact.norm()
    assert (found - exact)[..., 3].norm() < 0.02 * exact[..., 3].norm()


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_a_model_with_weights_alone_in_fewer_bits(how) -> None:
    """Shapes that 4 bits do not take, here a head of two classes and one of 90 words, stay."""
    plain = bert("BertForMaskedLM").bfloat16()
    prepared = prepare(plain, quantize=how)
    quantized = [name for name, one in prepared.model.named_modules() if isinstance(one, WeightOnlyLinear)]
    assert len(quantized) == 2 * 6 + (2 if how == "int8" else 1)
    tokens = torch.randint(5, 90, (2, 9))
    exact, found = (one(input_ids=tokens).logits.detach() for one in (plain, prepared))
    assert (found - exact).norm() < (0.05 if how == "int8" else 0.3) * exact.norm()


@pytest.mark.programs
def test_compiled_layers_answer_alike_whatever_the_lengths(monkeypatch) -> None:
    """Attention by document, whose sizes a graph would hold, stays outside; equal layers share graphs."""
    plain = bert("BertForMaskedLM", num_hidden_layers=3)
    prepared = prepare(plain, compile=True)
    taken = set()
    for lengths in ([9, 4], [5, 7, 2, 30], [3, 1, 8]):
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        tokens = torch.randint(5, 90, mask.shape)
        found, exact = (one(input_ids=tokens, attention_mask=mask).logits for one in (prepared, plain))
        torch.testing.assert_close(found[mask == 1], exact[mask == 1], rtol=1e-4, atol=1e-5)
        taken.add((prepared.compiled.graphs, prepared.compiled.recompiles, prepared.compiled.guards > 0))
    assert len(taken) == 1
    ((graphs, recompiles, has_guards),) = taken
    assert 1 <= graphs <= 4
    assert recompiles <= 1
    assert has_guards
    copied = prepare(prepared.model)
    with torch.no_grad():
        prepared.model.bert.encoder.layer[0].attention.self.value.weight.zero_()
    torch.testing.assert_close(copied(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    refused(RuntimeError, r"needs a C\+\+ compiler, and none was found", prepare, plain, compile=True)


def test_torchs_own_attention_keeps_the_weights_that_it_reads() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, dim_feedforward=128, batch_first=True)
    model = nn.Sequential(nn.Linear(64, 64), layer).eval()
    quantized = prepare(model, quantize="int8-dynamic")
    assert [type(one) for one in quantized.model] == [Int8Linear, nn.TransformerEncoderLayer]
    inputs = torch.randn(2, 5, 64)
    assert (quantized(inputs) - model(inputs)).norm() < 0.05 * model(inputs).norm()


def test_a_decoder_generates_and_reads_a_folder(tmp_path) -> None:
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=80, n_positions=64, **tokens)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    exact, quantized = prepare(tmp_path), prepare(str(tmp_path), quantize="int8-dynamic")
    assert not any(isinstance(one, Int8Linear) for one in exact.model.modules())
    assert sum(isinstance(one, Int8Linear) for one in quantized.model.modules()) == 9
    asked = torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 8, "do_sample": False}
    assert exact.generate(asked, **options).shape == quantized.generate(asked, **options).shape == (1, 11)
    logits = exact(asked).logits
    assert (quantized(asked).logits - logits).norm() < 0.05 * logits.norm()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}, {"use_cache": False}],
)
def test_caches_that_grow_give_the_tokens_of_caches_that_copy(options) -> None:
    """With padding on the left; beams reorder what is kept, and looked-up tokens that were wrong are cut off."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=40, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    asked = torch.randint(0, 40, (rows, 9))
    mask = torch.ones_like(asked)
    mask[1:, :3] = 0
    options |= {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(prepare(model).generate(asked, **options), model.generate(asked, **options))


def test_a_cache_that_grows_copies_seldom() -> None:
    config = transformers.GPT2Config(n_layer=1)
    cache, exact = growing_cache(config), transformers.DynamicCache(config=config)
    places = set()
    for tokens in (5, *[1] * 60):
        new = torch.randn(2, 4, 2, tokens, 8)
        for mine, plain in zip(cache.update(*new.unbind(), 0), exact.update(*new.unbind(), 0), strict=True):
            assert torch.equal(mine, plain)
        places.add(cache.layers[0].keys.data_ptr())
    assert cache.get_seq_length() == 65
    assert len(places) <= 5  # 5 tokens, then rooms for 10, 22, 46, 94


def test_a_model_that_fails_answers_with_its_error() -> None:
    class Fails(nn.Module):
        def forward(self, input_ids, attention_mask):
            if (input_ids == 7).any():
                raise ZeroDivisionError("seven")
            return input_ids.float().sum(dim=1, keepdim=True)

    with prepare(Fails()).queue(max_tokens=2, wait=0.0) as queue:
        bad, good = queue.submit([7]), queue.submit([3, 4])
        refused(ZeroDivisionError, "seven", bad.result, timeout=60)
        assert good.result(timeout=60)["output"].tolist() == [7.0]


def test_a_queue_that_is_full_or_closed() -> None:
    begun, go = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, input_ids, attention_mask):
            begun.set()
            assert go.wait(60)
            return input_ids.float()

    queue = prepare(Waits()).queue(max_tokens=1, wait=0.0, size=2)
    first = queue.submit([1])
    assert begun.wait(60)
    others = [queue.submit([2]), queue.submit([3])]
    refused(QueueFullError, "2 requests wait", queue.submit, [4])
    assert others[1].cancel()
    go.set()
    queue.close()
    queue.close()
    assert first.result(timeout=0)["output"].tolist() == [1.0]
    assert others[0].result(timeout=0)["output"].tolist() == [2.0]
    refused(QueueClosedError, "closed", queue.submit, [5])


def test_bad_input(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # another test may have been there
    with pytest.raises(ValueError, match="quantize is 'int3', expected None or 'int8-dynamic', 'int8', 'int4'"):
        prepare(bert(), quantize="int3")
    with pytest.raises(ValueError, match=r"for torch\.bfloat16 on CPUs, got torch\.float32 on cpu: give dtype"):
        prepare(bert(), quantize="int4")
    with pytest.raises(ValueError, match=r"for torch\.float32 on CPUs, got torch\.bfloat16 on cpu"):
        prepare(bert(), torch.bfloat16, "int8-dynamic")
    refused(ValueError, "ReLU has no linear layer", prepare, nn.ReLU(), quantize="int8-dynamic")
    refused(FileNotFoundError, r"has no config\.json", prepare, tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel=2, and torch\.distributed has no process group"):
        prepare(bert(), tensor_parallel=2)
    with pytest.raises(ValueError, match="tensor_parallel=2 does not go with quantize"):
        prepare(bert(), quantize="int8-dynamic", tensor_parallel=2)
    refused(ValueError, "max_tokens is 0, expected at least 1", prepare(bert()).queue, max_tokens=0)
    with prepare(bert()).queue() as queue:
        refused(ValueError, "a request of 49 tokens, and the model reads 48", queue.submit, [1] * 49)
        for tokens in ([], [[1]], [0.5]):
            refused(ValueError, "expected token numbers", queue.submit, tokens)
