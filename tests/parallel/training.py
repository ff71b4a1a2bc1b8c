"""``python -m tests.parallel.training TASK``: models trained over a pipeline's ranks, and in one process."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from tests.launching import same_on_all_ranks
from tests.refusing import refused
from thinwire import OneBitAdam, comm
from thinwire.parallel import Pipeline

PROGRAM = ("-m", "tests.parallel.training")
WORDS, LENGTH, ROWS, MICRO_BATCHES, RATE = 90, 12, 3, 4, 2e-3
LOSS = nn.functional.mse_loss


def bert() -> nn.Module:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **off, vocab_size=WORDS, max_position_embeddings=LENGTH))


def gpt2() -> nn.Module:
    torch.manual_seed(3)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=WORDS, n_positions=LENGTH, **off, **ends)
    )


def batches(replica: int = 0) -> Iterator[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(11 + replica)
    while True:
        tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=draws)
        mask = torch.ones_like(tokens)
        mask[0, -3:] = 0
        yield {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


class Alone:
    """The same in this process, with gradients added up."""

    def __init__(self, model: nn.Module, replicas: int = 1, max_norm: float | None = None) -> None:
        self.model, self.max_norm = model, max_norm
        self.streams = [batches(replica) for replica in range(replicas)]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def loss(self, streams: Sequence[Iterator[dict[str, Tensor]]]) -> Tensor:
        found = [self.model(**next(stream)).loss for stream in streams for _ in range(MICRO_BATCHES)]
        return torch.stack(found).mean()

    def step(self) -> float:
        loss = self.loss(self.streams)
        loss.backward()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def train(make: Callable[[], nn.Module], schedule: str, steps: int, **options: Any) -> None:
    model, alone = make(), Alone(make(), max_norm=1.0)
    pipeline = Pipeline(model, MICRO_BATCHES, schedule=schedule, **options)
    names = {name for name, _ in pipeline.named_parameters()}
    assert names <= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    optimizer, stream = torch.optim.AdamW(pipeline.parameters(), lr=RATE), batches()
    for count in (steps, 2):
        found = torch.stack([pipeline.train_batch(stream, optimizer, max_norm=1.0) for _ in range(count)])
        assert same_on_all_ranks(pipeline.comm, found)
        if pipeline.comm.rank == 0:
            assert found.tolist() == pytest.approx([alone.step() for _ in range(count)], rel=1e-5), schedule
        if schedule == "ZBVZeroBubble":
            refused(RuntimeError, "ScheduleZBVZeroBubble cannot evaluate", pipeline.eval_batch, batches())
            continue
        evaluated = pipeline.eval_batch(batches()).view(1)
        assert same_on_all_ranks(pipeline.comm, evaluated)
        if pipeline.comm.rank == 0:
            assert float(evaluated) == pytest.approx(float(alone.loss([batches()])), rel=1e-5)
    for tied_over, parameter, _ in pipeline._ties:
        assert same_on_all_ranks(tied_over, parameter.detach())


def models() -> None:
    for make in (bert, gpt2):
        train(make, "1F1B", 50)


def schedules() -> None:
    """Two stages a rank: tied embeddings lie on two ranks, or in a V on one."""
    for schedule in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble"):
        train(gpt2, schedule, 3)
    train(bert, "1F1B", 2, split=["bert.encoder.layer.3"])


def sequential() -> None:
    """Named where it is cut; with dropout, which every stage draws for itself, it trains."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 30), nn.GELU(), nn.Dropout(0.1), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 8))
    pipeline = Pipeline(model, 2, split=["3"], loss_fn=nn.functional.mse_loss, activations="int8", gradients="int8")
    mine = {name.split(".")[0] for name, _ in pipeline.named_parameters()}
    assert mine == ({"3", "5"} if pipeline.comm.rank else {"0"})
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    inputs = torch.randn(40, 8)
    losses = [
        pipeline.train_batch(iter([(inputs[:20], inputs[:20]), (inputs[20:], inputs[20:])]), optimizer)
        for _ in range(40)
    ]
    assert losses[-1] < losses[0] / 2


def replicas() -> None:
    """Two stages of two replicas each, whose gradients 1-bit Adam averages: exactly, then in one bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, alone = Pipeline(gpt2(), MICRO_BATCHES, mesh=mesh), Alone(gpt2(), replicas=2)
    optimizer = OneBitAdam(pipeline.named_parameters(), lr=RATE, weight_decay=0.01, freeze_step=10, mesh=mesh["dp"])
    stream = batches(mesh.get_local_rank("dp"))
    found = [float(pipeline.train_batch(stream, optimizer)) for _ in range(10)]
    assert found == pytest.approx([alone.step() for _ in range(10)], rel=1e-5)
    frozen = [float(pipeline.train_batch(stream, optimizer)) for _ in range(10)]
    assert frozen == pytest.approx([alone.step() for _ in range(10)], rel=0.02)
    assert optimizer.frozen
    whole = comm.init()
    tied = [one for name, one in pipeline.named_parameters() if name in ("transformer.wte.weight", "lm_head.weight")]
    assert len(set(whole.all_gather_bytes(tied[0].detach().numpy().tobytes()))) == 1
    refused(ValueError, "clip what each replica has", pipeline.train_batch, stream, optimizer, max_norm=1.0)
    optimizer.max_norm = 1.0
    refused(ValueError, "by its stage's norm alone", pipeline.train_batch, stream, optimizer)


def refusals() -> None:
    rank = comm.init().rank
    for model, told, options in (
        (nn.Linear(2, 2), "Linear cannot be split: a Hugging Face encoder", {}),
        (nn.Sequential(nn.Linear(2, 2)), "has no loss of its own: give loss_fn", {}),
        (nn.Sequential(nn.Linear(2, 2)), "has 1 blocks, too few for 2 stages", {"loss_fn": LOSS}),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "a BatchNorm with running statistics", {"loss_fn": LOSS}),
        (
            nn.Sequential(nn.Linear(2, 2), nn.GELU()),
            "stage 1 of 2 has no parameters",
            {"loss_fn": LOSS, "split": ["1"]},
        ),
        (gpt2(), "'h.1'.*: blocks are transformer.h.0, ", {"split": ["h.1"]}),
        (
            gpt2(),
            "first blocks of the other 1 of 2 stages, in order",
            {"split": ["transformer.h.1", "transformer.h.2"]},
        ),
        (
            gpt2(),
            "no stage can begin with 'h.1'" if rank else "rank 1 could not split",
            {"split": ["h.1"]} if rank else {},
        ),
        (gpt2(), "activations must be", {"activations": "sign1"}),
    ):
        refused(ValueError, told, Pipeline, model, 4, **options)
    pipeline = Pipeline(gpt2(), 2)
    one, short = next(batches()), {name: value[:2] for name, value in next(batches()).items()}
    refused(ValueError, "an iterator, not a list: give iter", pipeline.train_batch, [one, one])
    refused(ValueError, "has input_ids and labels, .*got \\['labels'\\]", pipeline.train_batch, iter([{"labels": 1}]))
    refused(ValueError, "only 1 micro-batches were left", pipeline.train_batch, iter([one]))
    refused(ValueError, "micro-batch 1 is .*take micro-batches of one shape", pipeline.train_batch, iter([one, short]))
    refused(
        StopIteration if rank else ValueError,
        "" if rank else "rank 1 could not",
        pipeline.train_batch,
        iter([] if rank else [one, one]),
    )
    pipeline.train_batch(iter([one, one]))
    refused(ValueError, "micro-batch 0 is", pipeline.train_batch, iter([short, short]))
    pipeline.eval_batch(iter([short, short]))


def small() -> None:
    for task in (schedules, sequential, refusals):
        task()


if __name__ == "__main__":
    comm.init(timeout=60.0)
    globals()[sys.argv[1]](*sys.argv[2:])
