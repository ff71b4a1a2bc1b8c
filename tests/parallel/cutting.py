"""``python -m tests.parallel.cutting``: what two launched ranks do with models that `parallelize` cuts."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLNetConfig,
    XLNetModel,
)

from tests.refusing import refused
from thinwire.comm import Communicator
from thinwire.deepspeed import init_inference
from thinwire.inference import prepare
from thinwire.parallel import parallelize

WORDS, LENGTH = 40, 8
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
KEYS = {"num_key_value_heads": 2, "head_dim": 4}


def bert(p: float = 0.0) -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=p, attention_probs_dropout_prob=p))


def roberta(p: float = 0.0) -> nn.Module:
    return RobertaForMaskedLM(RobertaConfig(**SIZES, **ENDS, hidden_dropout_prob=p, attention_probs_dropout_prob=p))


def gpt2(p: float = 0.0) -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ENDS, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p))


def modernbert(p: float = 0.0) -> nn.Module:
    dropout = dict.fromkeys(("attention_dropout", "mlp_dropout", "embedding_dropout"), p)
    return ModernBertForMaskedLM(ModernBertConfig(**SIZES, **ENDS, **dropout, cls_token_id=1, sep_token_id=2))


def llama(p: float = 0.0) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **ENDS, **KEYS, attention_dropout=p))


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **ENDS, **KEYS))


def words() -> Tensor:
    return torch.randint(3, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(5))


def gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch, and what all ranks together have of its gradients."""
    model.zero_grad()
    loss = model(input_ids=words(), labels=words()).loss
    loss.backward()
    return loss.item(), {name: whole(one.grad) for name, one in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def as_whole(mesh: DeviceMesh) -> None:
    """Forward and gradients are the whole model's, which rank 0 has; and so are the parameters, put together."""
    for build in (bert, roberta, gpt2, modernbert, llama, qwen3):
        for sequence in (False, True)[: 1 + (build is not qwen3)]:
            torch.manual_seed(1)
            model = build()
            loss, expected = gradients(model)
            torch.manual_seed(dist.get_rank() + 1)
            cut = parallelize(build(), mesh, sequence_parallel=sequence)
            for (name, one), other in zip(cut.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(whole(one), other), (build, name)
            parts = sum(isinstance(one, DTensor) and not one.placements[0].is_replicate() for one in cut.parameters())
            assert parts >= 8, (build, parts)
            found, grads = gradients(cut)
            assert abs(found / loss - 1) < 1e-5, (build, sequence, found, loss)
            total = torch.stack([one.norm() for one in expected.values()]).norm()
            for name, one in grads.items():  # that of a key's bias is nothing but rounding
                error = (one - expected[name]).norm()
                assert error < 1e-5 * expected[name].norm() + 1e-7 * total, (build, sequence, name, error)


def dropout(mesh: DeviceMesh) -> None:
    """What is whole is dropped alike, what is cut is not, and what is computed again is dropped again."""
    comm = Communicator.of(mesh)
    for build in (bert, gpt2, modernbert, llama):
        for sequence in (False, True):
            torch.manual_seed(dist.get_rank())
            model = parallelize(build(0.3), mesh, sequence_parallel=sequence).train()
            drawn: dict[str, list[bytes]] = {"cut": [], "whole": []}

            def draw(kind: str, drawn: dict[str, list[bytes]] = drawn) -> Any:
                return lambda *_: drawn[kind].append(torch.rand(4).numpy().tobytes())

            for name, module in model.named_modules():
                if name.endswith(("query", "c_attn", "Wqkv", "q_proj", "Wi", "c_fc")):
                    module.register_forward_hook(draw("cut"))
                if name.endswith(("output.dense", "c_proj", "Wo", "o_proj")):
                    module.register_forward_hook(draw("whole"))
                if name.endswith(("output.dropout", "resid_dropout", "mlp.dropout", "out_drop")):
                    module.register_forward_pre_hook(draw("cut" if sequence else "whole"))
            _, grads = gradients(model)
            for kind, numbers in drawn.items():
                first, second = comm.all_gather_bytes(b"".join(numbers))
                assert numbers
                assert (first == second) == (kind == "whole"), (build, kind)
            torch.manual_seed(3)
            _, grads = gradients(model)
            blocks = b"".join(one.numpy().tobytes() for one in grads.values())
            assert len(set(comm.all_gather_bytes(blocks))) == 1
            torch.manual_seed(3)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            _, again = gradients(model)
            for name, one in grads.items():
                assert torch.equal(one, again[name]), (build, sequence, name)


def refusals(mesh: DeviceMesh) -> None:
    """By name, on every rank, with nothing changed."""

    def of(build: Any, config: Any, **sizes: Any) -> nn.Module:
        return build(config(**{**SIZES, **ENDS, **sizes}))

    heads = of(BertForMaskedLM, BertConfig, hidden_size=18, num_attention_heads=3)
    refused(ValueError, "num_attention_heads=3, which 2 ranks", parallelize, heads, mesh)
    keys = of(LlamaForCausalLM, LlamaConfig, num_key_value_heads=1)
    refused(ValueError, "num_key_value_heads=1, which 2 ranks", parallelize, keys, mesh)
    odd = of(BertForMaskedLM, BertConfig, intermediate_size=25)
    refused(ValueError, "layer.0.intermediate.dense is 25 wide, which 2 ranks", parallelize, odd, mesh)
    refused(ValueError, "no plan of how to cut a Sequential", parallelize, nn.Sequential(nn.Linear(4, 4)), mesh)
    xlnet = XLNetModel(XLNetConfig(vocab_size=WORDS, d_model=16, n_layer=1, n_head=4, d_inner=24))
    refused(ValueError, "no plan of how to cut a XLNetModel", parallelize, xlnet, mesh)
    mistral = of(MistralForCausalLM, MistralConfig, num_key_value_heads=2)
    refused(ValueError, "which norms", parallelize, mistral, mesh, sequence_parallel=True)
    experts = of(PhimoeForCausalLM, PhimoeConfig, num_key_value_heads=2, num_local_experts=2)
    refused(ValueError, "would cut layers.0", parallelize, experts, mesh)
    for model in (heads, keys, odd, mistral, experts):
        assert not any(isinstance(one, DTensor) for one in model.parameters())
    refused(ValueError, "DeviceMesh of one dimension", parallelize, bert(), init_device_mesh("cpu", (1, 2)))
    refused(ValueError, "DTensors already", parallelize, parallelize(bert(), mesh), mesh)
    mine = bert() if dist.get_rank() else roberta()
    refused(ValueError, "differ", parallelize, mine, mesh)


def answers(mesh: DeviceMesh) -> None:
    """Prepared models answer as the first rank's whole one, padding left out, and generate its tokens."""
    tokens, mask = words(), torch.ones(4, LENGTH, dtype=torch.int64)
    mask[0, :3] = mask[2, :5] = 0
    for build in (bert, gpt2):
        torch.manual_seed(1)
        whole = build().eval()
        torch.manual_seed(dist.get_rank() + 1)
        given = build()
        before = {name: one.clone() for name, one in given.state_dict().items()}
        prepared = prepare(given, tensor_parallel=2)
        found, exact = (one(input_ids=tokens, attention_mask=mask).logits[mask == 1] for one in (prepared, whole))
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(before[name], one) for name, one in given.state_dict().items())
        if build is gpt2:
            options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            expected = whole.generate(tokens, **options)
            assert torch.equal(prepared.generate(tokens, **options), expected)
            engine = init_inference(given, tensor_parallel={"tp_size": 2}, dtype=torch.float32)
            assert engine.module is given
            assert torch.equal(engine.generate(tokens, **options), expected)
    refused(ValueError, "batches by the time", prepared.queue)
    refused(ValueError, r"tensor_parallel=3, and torch\.distributed has 2", prepare, whole, tensor_parallel=3)
    folder = "." if dist.get_rank() else "no folder"  # neither has a configuration
    refused((ValueError, OSError), "config.json", prepare, folder, tensor_parallel=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pair = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        as_whole(pair)
        dropout(pair)
        refusals(pair)
        answers(pair)
    dist.barrier()
    dist.destroy_process_group()
