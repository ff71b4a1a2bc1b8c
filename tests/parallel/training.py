"""``python -m tests.parallel.training TASK...``: models trained over a pipeline's ranks, and in one process."""

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from tests.launching import same_on_all_ranks
from tests.plan.strategies import ethernet
from tests.refusing import refused
from thinwire import DiLoCo, OneBitAdam, comm
from thinwire.comm import Communicator, threads
from thinwire.parallel import Pipeline, parallelize
from thinwire.plan import Method, Schedule
from thinwire.plan.meshes import Mesh, MeshJob, predict_mesh
from thinwire.plan.models import model_of
from thinwire.plan.workload import named_device
from thinwire.zero import ShardedOptimizer

WORDS, LENGTH, ROWS, MICRO_BATCHES, RATE = 90, 12, 3, 4, 2e-3
LOSS = nn.functional.mse_loss


def bert(layers: int = 4) -> nn.Module:
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 64}
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

    def __init__(
        self, model: nn.Module, replicas: int = 1, max_norm: float | None = None, micro_batches: int = MICRO_BATCHES
    ) -> None:
        self.model, self.max_norm, self.micro_batches = model, max_norm, micro_batches
        self.norms: list[float] = []
        self.streams = [batches(replica) for replica in range(replicas)]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def loss(self, streams: Sequence[Iterator[dict[str, Tensor]]]) -> Tensor:
        found = [self.model(**next(stream)).loss for stream in streams for _ in range(self.micro_batches)]
        return torch.stack(found).mean()

    def step(self) -> float:
        loss = self.loss(self.streams)
        loss.backward()
        if self.max_norm is not None:
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def train(make: Callable[[], nn.Module], schedule: str, micro_batches: int = MICRO_BATCHES, **options: Any) -> None:
    model, alone = make(), Alone(make(), max_norm=1.0, micro_batches=micro_batches)
    pipeline = Pipeline(model, micro_batches, schedule=schedule, **options)
    names = {name for name, _ in pipeline.named_parameters()}
    assert names <= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    optimizer, stream = torch.optim.AdamW(pipeline.parameters(), lr=RATE), batches()
    for count in (2, 1):
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
    for tied_over, parameter in pipeline._ties:
        assert same_on_all_ranks(tied_over, parameter.detach())


def models() -> None:
    for make in (bert, gpt2):
        train(make, "1F1B")


def schedules() -> None:
    """Two stages a rank: tied embeddings lie on two ranks, or in a V on one. Then one, of fewer micro-batches too."""
    for schedule in ("GPipe", "Eager1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        train(gpt2, schedule)
    train(bert, "1F1B", split=["bert.encoder.layer.3"])
    train(bert, "1F1B", micro_batches=1)


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
    views()


def views() -> None:
    """Of three dimensions, what a linear layer gives is a view; the loss has all its digits in any default dtype."""
    torch.manual_seed(4)
    model, inputs = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(4, 3, 5, 8)
    expected = LOSS(model(inputs), inputs).detach()
    for schedule in ("InterleavedZeroBubble", "DualPipeV"):
        pipeline = Pipeline(copy.deepcopy(model), 4, schedule=schedule, loss_fn=LOSS)
        torch.set_default_dtype(torch.bfloat16)
        try:
            loss = pipeline.train_batch(iter([(one, one) for one in inputs]))
        finally:
            torch.set_default_dtype(torch.float32)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5), schedule


def same_replicas(mesh: DeviceMesh, pipeline: Pipeline) -> None:
    """What several ranks hold has the same bits on all of them: replicas, and of a replica what is not cut and ties."""
    held = [(getattr(one, "_local_tensor", one).detach(), one) for one in pipeline.parameters()]
    ties = {id(one) for _, one in pipeline._ties}
    whole = [local for local, one in held if local.shape == one.shape]
    over = {"dp": [local for local, _ in held], "pp": [local for local, one in held if id(one) in ties], "tp": whole}
    for name in mesh.mesh_dim_names or ():
        found = torch.cat([local.reshape(-1) for local in over[name]])
        assert same_on_all_ranks(Communicator.of(mesh[name]), found), name


def near(pipeline: Pipeline, optimizer: Any, alone: Alone, stream: Iterator[Any], steps: int) -> None:
    """Losses and norms are those of one process."""
    found = [(float(pipeline.train_batch(stream, optimizer)), optimizer.last_step.grad_norm) for _ in range(steps)]
    assert same_on_all_ranks(comm.init(), torch.tensor(found))
    for loss, norm in found if dist.get_rank() == 0 else ():
        assert loss == pytest.approx(alone.step(), rel=1e-5)
        assert norm == pytest.approx(alone.norms[-1], rel=1e-4)


def near_compressed(
    mesh: DeviceMesh, make: Callable[[], nn.Module], pipeline: Pipeline, warm: int, **options: Any
) -> Any:
    """1-bit Adam steps as one process does, and from the freeze on as ranks that hold whole models."""
    options = {"lr": RATE, "weight_decay": 0.01, "freeze_step": warm, "max_norm": 1.0, **options}
    optimizer = OneBitAdam(pipeline.named_parameters(), mesh=mesh["dp"], **options)
    stream = batches(mesh.get_local_rank("dp"))
    near(pipeline, optimizer, Alone(make(), 2, 1.0, pipeline.micro_batches), stream, warm)
    found = [float(pipeline.train_batch(stream, optimizer)) for _ in range(2 * warm)]
    assert optimizer.frozen
    same_replicas(mesh, pipeline)

    made = make()

    def unsplit(ranks: Communicator) -> list[float]:
        model, own = copy.deepcopy(made), batches(ranks.rank)
        whole, losses = OneBitAdam(model.named_parameters(), comm=ranks, **options), []
        for _ in range(3 * warm):
            mean = torch.zeros(())
            for number in reversed(range(pipeline.micro_batches)):
                loss = model(**next(own)).loss / pipeline.micro_batches
                with whole.no_sync() if number else contextlib.nullcontext():
                    loss.backward()
                mean += loss.detach()
            whole.step()
            whole.zero_grad()
            ranks.all_reduce(mean, "mean")
            losses.append(float(mean))
        return losses[warm:]

    if dist.get_rank() == 0:
        assert sum(found) == pytest.approx(sum(threads.run(unsplit, 2)[0]), rel=0.01)
    return optimizer, stream


def skip_together(pipeline: Pipeline, optimizer: Any, stream: Iterator[Any]) -> None:
    """A gradient of one rank that is not finite stops the step on all stages, parts and replicas."""
    held = [getattr(one, "_local_tensor", one).detach().clone() for one in pipeline.parameters()]
    steps, last = optimizer.steps, [*pipeline.parameters()][-1]
    hook = last.register_hook(lambda gradient: gradient * (math.nan if dist.get_rank() == 0 else 1.0))
    pipeline.train_batch(stream, optimizer)
    hook.remove()
    assert optimizer.overflow
    assert optimizer.steps == steps
    for before, one in zip(held, pipeline.parameters(), strict=True):
        assert torch.equal(before, getattr(one, "_local_tensor", one))


def near_exact(mesh: DeviceMesh, make: Callable[[], nn.Module], pipeline: Pipeline, stage: int) -> None:
    optimizer = ShardedOptimizer(
        pipeline.parameters(), torch.optim.AdamW, lr=RATE, stage=stage, mesh=mesh["dp"], max_norm=1.0
    )
    stream = batches(mesh.get_local_rank("dp"))
    near(pipeline, optimizer, Alone(make(), 2, 1.0, pipeline.micro_batches), stream, 2)
    same_replicas(mesh, pipeline)
    skip_together(pipeline, optimizer, stream)


def replicas() -> None:
    """Two stages of two replicas each, clipped: averaged exactly, by owners too; then in one bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for stage in (0, 1):
        near_exact(mesh, gpt2, Pipeline(gpt2(), 2, mesh=mesh), stage)
    pipeline = Pipeline(gpt2(), 2, mesh=mesh)
    optimizer, stream = near_compressed(mesh, gpt2, pipeline, 3)
    skip_together(pipeline, optimizer, stream)
    refused(ValueError, "give max_norm to an optimizer", pipeline.train_batch, stream, optimizer, max_norm=1.0)
    plain = torch.optim.SGD(pipeline.parameters(), lr=RATE)
    refused(ValueError, "SGD averages no gradients over the replicas", pipeline.train_batch, stream, plain)
    refused(ValueError, "ranks .* hold other elements than this one", OneBitAdam, pipeline.parameters(), lr=RATE)
    refused(TypeError, "not a pipeline's", DiLoCo, pipeline.parameters(), torch.optim.AdamW, lr=RATE, mesh=mesh["dp"])
    given = {"lr": RATE, "mesh": mesh["dp"], "max_norm": 1.0 + mesh.get_local_rank("pp")}
    refused(ValueError, "max_norm is 2.0 against 1.0", OneBitAdam, pipeline.parameters(), **given)
    small = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))  # its stages have blocks of unlike length
    OneBitAdam(Pipeline(small, 2, mesh=mesh, loss_fn=LOSS).parameters(), lr=RATE, mesh=mesh["dp"]).close()
    other = ShardedOptimizer(gpt2().parameters(), torch.optim.AdamW, lr=RATE, mesh=mesh["dp"])
    refused(ValueError, "has parameters of no pipeline", pipeline.train_batch, stream, other)


def cut_bert(mesh: DeviceMesh) -> nn.Module:
    """With torch's own calls; its embedding too, which its head shares."""
    model: Any = bert(2)
    column, row = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {f"attention.self.{one}": column for one in ("query", "key", "value")}
    plan |= {"attention.output.dense": row, "intermediate.dense": column, "output.dense": row}
    for layer in model.bert.encoder.layer:
        parallelize_module(layer, mesh, plan)
    embeddings, head = model.bert.embeddings, model.cls.predictions
    parallelize_module(embeddings, mesh, {"word_embeddings": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(head, mesh, {"decoder": ColwiseParallel(output_layouts=Replicate())})
    head.decoder.weight = embeddings.word_embeddings.weight
    head.bias = head.decoder.bias
    return model


def sent_as_planned(mesh: DeviceMesh) -> None:
    """What all replicas send in a step to average, beside the norm's sketch in 1 bit, of which a replica has one."""
    sizes = GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=1000, n_positions=64, bos_token_id=0, eos_token_id=0)
    job = MeshJob(model_of("gpt", sizes.to_dict()), ethernet(4, 2), named_device("a100"), 4 * ROWS, LENGTH)
    given: dict[str, Any] = {"lr": RATE, "max_norm": 1.0, "mesh": mesh["dp"]}
    for method, for_norms in ((Method("onebit-adam"), 2 * 65536), (Method("sharded-adam", 1), 0)):
        model = parallelize(GPT2LMHeadModel(sizes).bfloat16(), mesh["tp"])
        pipeline = Pipeline(model, 2, mesh=mesh)
        optimizer: Any = (
            ShardedOptimizer(pipeline.parameters(), torch.optim.AdamW, stage=1, **given)
            if method.stage
            else OneBitAdam(pipeline.parameters(), freeze_step=1, **given)
        )
        short = ({name: one[:1, :4] for name, one in given.items()} for given in batches(mesh.get_local_rank("dp")))
        sent = torch.zeros(())
        for sign in (-1, 1):
            pipeline.train_batch(short, optimizer)
            sent += sign * optimizer.bytes_sent
        comm.init().all_reduce(sent)
        planned = predict_mesh(job, Mesh(2, 2, 2, method, micro_batch=ROWS), Schedule(10, 0.0)).bytes_sent
        assert float(sent) - for_norms == pytest.approx(8 * planned, rel=0.01), method


def cube() -> None:
    """Two stages, of two replicas each, each cut in two."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    sent_as_planned(mesh)
    model = parallelize(gpt2(), mesh["tp"])
    near_exact(mesh, gpt2, Pipeline(model, 2, mesh=mesh), 1)
    pipeline = Pipeline(cut_bert(mesh["tp"]), 2, mesh=mesh)
    optimizer, stream = near_compressed(mesh, partial(bert, 2), pipeline, 3)
    skip_together(pipeline, optimizer, stream)
    refused(ValueError, "give max_norm to an optimizer", pipeline.train_batch, stream, max_norm=1.0)


def refusals() -> None:
    rank = comm.init().rank
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    for loss, told in (
        (lambda output, target: output, r"a tensor of shape \(3, 2\)"),
        (lambda *given: None, "NoneType"),
    ):
        alone = Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, mesh=mesh, loss_fn=loss)
        refused(ValueError, f"loss_fn returned {told}: let it", alone.train_batch, iter([(torch.ones(3, 2), 0)]))
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
        (gpt2(), "is 1F1B, Eager1F1B, .*, not 'PipelineScheduleMulti'", {"schedule": "PipelineScheduleMulti"}),
        (gpt2(), 'split is "parameters", "time" or a list', {"split": "params"}),
        (gpt2(), "rank 1 and rank 0 differ: micro_batches is 5 against 4", {"micro_batches": 4 + rank}),
        (gpt2(), "rank 1 and rank 0 differ: schedule is 'GPipe'", {"schedule": ("1F1B", "GPipe")[rank]}),
        (gpt2() if rank else bert(), "rank 1 and rank 0 differ: .* parameters", {}),
        (gpt2(), "micro_batches is a whole number, at least 1, not 0", {"micro_batches": 0}),
        (gpt2(), "has a dimension \"pp\" for its stages, not \\('dp',\\) alone", {"mesh": mesh["dp"]}),
        (nn.Sequential(nn.GELU(), nn.GELU()), "Sequential has no parameters", {"loss_fn": LOSS}),
    ):
        refused(ValueError, told, Pipeline, model, **{"micro_batches": 4, **options})
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


if __name__ == "__main__":
    comm.init(timeout=60.0)
    for task in sys.argv[1:]:
        globals()[task]()
