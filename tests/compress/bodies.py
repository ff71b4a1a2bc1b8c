"""What must hold on any communicator of any size, and beside DistributedDataParallel: bodies for real ranks.

As a program, one rank of a launch."""

import copy
import itertools
import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.optim.adam.reference import ReferenceExchange
from tests.optim.diloco import tower
from tests.optim.subject import HOMES, LOCAL, Subject, alike
from tests.optim.training import exchange_comm, loss_of, make_model, make_optimizer, train, weights
from tests.refusing import refused
from thinwire.comm import Communicator
from thinwire.compress import Exchange, make_codec
from thinwire.compress.packet_layout import shard_numel
from thinwire.zero import ShardedOptimizer

BLOCK = 64


def decisive_payloads(size: int, numel: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Random payloads [steps, size, numel] fp32, and what Algorithm 1 makes of them in float64, [steps, numel].

    A value within fp32's rounding of 0 may take either sign, after which two right answers go different ways. So these
    are payloads on which every sign is taken by at least 1e-6 of its block's scale.
    """
    for seed in itertools.count(1000 * size + numel):
        payloads = np.random.default_rng(seed).standard_normal((steps, size, numel)).astype(np.float32)
        reference = ReferenceExchange(numel, size, BLOCK)
        expected = np.stack([reference(step.astype(np.float64)) for step in payloads])
        if reference.closest_call > 1e-6:
            return payloads, expected
    raise AssertionError("unreachable: itertools.count does not end")


def exchange_equals_the_algorithm(
    comm: Communicator, numel: int = 1000, steps: int = 100, part: int | None = None
) -> None:
    """The exchange and Algorithm 1 in float64, over `steps` steps: equal to 1e-6 relative, and alike on every rank."""
    payloads, expected = decisive_payloads(comm.size, numel, steps)
    exchange = Exchange(comm, numel, make_codec("sign1", BLOCK), part=part)
    outputs = np.stack([exchange.average(torch.from_numpy(p[comm.rank]), i).numpy() for i, p in enumerate(payloads)])
    errors = np.linalg.norm(outputs - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= 1e-6, f"{errors.max():.1e}"
    assert len(set(comm.all_gather_bytes(outputs.tobytes()))) == 1


def every_optimizer_agrees(comm: Communicator) -> None:
    """One of each kind of home, and over nodes two of them, through steps of every kind."""
    subjects = [some[-1] for some in HOMES]
    # Every two ranks count as a node, so that the last one of an odd number has one.
    by_node = {"nodes": [rank // 2 for rank in range(comm.size)]}
    by_nodes = [(one, by_node) for one in (Subject("OneBitAdam", 0), Subject("ZeroOneAdam", 0))]
    for subject, options in [*((one, {}) for one in subjects), *by_nodes]:
        model = make_model(seed=comm.rank)  # rank 0's weights are broadcast
        optimizer = subject.build(model, comm, **options)
        losses = train(model, optimizer, range(LOCAL + 4))
        optimizer.synchronize_weights()
        assert optimizer.frozen
        assert np.mean(losses[-4:]) < np.mean(losses[:4])
        assert alike(comm, model), subject
        optimizer.close()


def stages_are_bit_identical(comm: Communicator) -> None:
    """AdamW on ZeRO stages 0, 1 and 2."""
    outcomes = set()
    for stage in (0, 1, 2):
        model = make_model(seed=comm.rank)
        options = {"stage": stage, "comm": comm, "named_parameters": model.named_parameters(), "bucket_bytes": 400}
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, max_norm=0.5, **options)
        optimizer.gather_during_forward(model)
        train(model, optimizer, range(15))
        optimizer.wait_for_weights()
        outcomes |= set(comm.all_gather_bytes(weights(model).numpy().tobytes()))
        optimizer.close()
    assert len(outcomes) == 1


def rounded_steps_agree(comm: Communicator) -> None:
    """Of AdamW in 4 bits, at each stage, and of 1-bit Muon."""
    muon = partial(thinwire.OneBitMuon, codec=("stat2", "sign1"))
    rounded = partial(ShardedOptimizer, optimizer_class=torch.optim.AdamW, codec="int4")
    for make, stage in ((muon, 1), *((rounded, stage) for stage in (0, 1, 2))):
        model = make_model(seed=comm.rank)
        optimizer = make(model.named_parameters(), lr=3e-3, stage=stage, comm=comm, block_size=64, bucket_bytes=400)
        losses = train(model, optimizer, range(15))
        assert np.mean(losses[-4:]) < np.mean(losses[:4])
        assert alike(comm, model), (make, stage)
        optimizer.close()


# Beside DistributedDataParallel: the hook, and 1-bit Adam attached to a model of its


def hooked(comm: Communicator, codec: str, **options: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)
    state = thinwire.compress.CompressionState(comm, codec=codec, **({"block_size": 64} | options))
    model.register_comm_hook(state, thinwire.compress.ddp_hook)
    return model, state


def averages(model: DistributedDataParallel, comm: Communicator, step: int) -> Tensor:
    """The gradients that DDP leaves."""
    model.zero_grad()
    loss_of(model, comm.rank, step).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def hook_trains_like_ddp(comm: Communicator) -> None:
    """DDP with the hook and torch's own optimizer: a falling loss, the same bits everywhere."""
    for codec in ("sign1", "bf16"):
        model, state = hooked(comm, codec, start_step=5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        losses = [ddp_step(model, optimizer, comm, step) for step in range(25)]
        assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
        assert alike(comm, model)
        assert state.step == 25
        assert len(state._exchanges) > 1


def hook_with_none_averages_exactly(comm: Communicator) -> None:
    """The hook that compresses nothing gives DDP's own gradients."""
    plain = DistributedDataParallel(make_model())
    found, wanted = (averages(model, comm, 0) for model in (hooked(comm, "none")[0], plain))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def hook_passes_overflow_on_and_keeps_its_residuals(comm: Communicator) -> None:
    """One rank's NaN reaches every rank's gradients; the residuals stay finite."""
    model, state = hooked(comm, "sign1", start_step=1)
    for step in range(4):
        model.zero_grad()
        (loss_of(model, comm.rank, step) * (float("nan") if step == 2 and comm.rank == 0 else 1.0)).backward()
        finite = all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
        assert finite == (step != 2)
        assert all(bool(torch.isfinite(e.payload).all()) for e in state._exchanges.values()) or step == 2


def hook_resumes_with_its_residuals(comm: Communicator) -> None:
    """One step later than the run that went on, as the first one after a resume is exact, with the same bits."""
    model, state = hooked(comm, "sign1")
    for step in range(4):
        averages(model, comm, step)
    saved = copy.deepcopy(state.state_dict())
    assert len(saved["buckets"]) > 1
    wanted = averages(model, comm, 9)
    model, state = hooked(comm, "sign1")
    state.load_state_dict(saved)
    exact, plain = averages(model, comm, 5), averages(DistributedDataParallel(make_model()), comm, 5)
    torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-7)
    assert torch.equal(averages(model, comm, 9), wanted)
    refused(ValueError, "saved with codec=", hooked(comm, "int8")[1].load_state_dict, saved)
    with pytest.raises(ValueError, match="saved with rank="):
        state.load_state_dict({**saved, "rank": comm.size - 1})  # which the last rank's is
    before = state.state_dict()
    for change in (
        {"step": None},
        {"step": -1},
        {"buckets": []},
        {"buckets": {0: {**saved["buckets"][0], "owner": None}}},
    ):
        with pytest.raises(ValueError, match=r"the state of its hook|the hook's state"):
            state.load_state_dict({**saved, **(change if comm.rank == 0 else {})})
    assert state.state_dict()["step"] == before["step"]
    model, state = hooked(comm, "sign1")
    shard = shard_numel(3, comm.size, saved["block_size"])
    other = {"numel": 3, "worker": torch.zeros(shard * comm.size), "owner": torch.zeros(shard)}
    state.load_state_dict({**saved, "buckets": {0: other}})
    averages(model, comm, 0)
    with pytest.warns(RuntimeWarning, match="bucket 0 has .* saved with 3"):
        averages(model, comm, 1)


def attached_equals_alone(comm: Communicator) -> None:
    """1-bit Adam attached to a DDP model gives the weights it gives without DDP, and DDP sends nothing."""
    alone, inner = make_model(), make_model()
    train(alone, make_optimizer(alone, comm, freeze_step=5), range(10))
    model = DistributedDataParallel(inner)
    optimizer = make_optimizer(inner, comm, freeze_step=5).attach(model)
    for step in range(10):
        ddp_step(model, optimizer, comm, step)
    torch.testing.assert_close(weights(inner), weights(alone), rtol=1e-4, atol=1e-5)
    assert alike(comm, inner)


def attached_obeys_ddps_no_sync(comm: Communicator) -> None:
    """Gradients accumulated under DDP's no_sync leave once, with the last backward."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = make_optimizer(inner, comm).attach(model)
    traffic = exchange_comm(optimizer).traffic
    for step in range(3):
        optimizer.zero_grad()
        before = traffic.calls
        with model.no_sync():
            loss_of(model, comm.rank, 2 * step).backward()
        assert traffic.calls == before
        loss_of(model, comm.rank, 2 * step + 1).backward()
        optimizer.step()
        assert traffic.calls == before + 2


def attached_scalers_back_off_together(comm: Communicator) -> None:
    """One rank's overflow halves every rank's loss scale, though DDP writes gradients back after backward."""
    for as_view in (False, True):
        inner = make_model()
        model = DistributedDataParallel(inner, gradient_as_bucket_view=as_view)
        optimizer = make_optimizer(inner, comm, freeze_step=5).attach(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(12):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            scaler.scale(loss * float("inf") if step in (2, 8) and comm.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8
        assert alike(comm, inner)


def attached_refuses_edited_gradients(comm: Communicator) -> None:
    """Clipping after backward is an error beside DDP too."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = make_optimizer(inner, comm).attach(model)
    loss_of(model, comm.rank, 0).backward()
    torch.nn.utils.clip_grad_norm_(inner.parameters(), 1e-3)
    refused(RuntimeError, "changed or dropped", optimizer.step)


def ddp_is_found_and_attached_at_every_stage(comm: Communicator) -> None:
    """A DDP model that nobody attached sends nothing from the first backward on, and its no_sync is obeyed."""
    for stage in (0, 1, 2):
        runs = []
        for attached in (True, False):
            inner = make_model()
            model = DistributedDataParallel(inner)
            optimizer = make_optimizer(inner, comm, stage=stage, freeze_step=4)
            if attached:
                optimizer.attach(model)
            losses = []
            for step in range(8):
                if stage < 2:
                    with model.no_sync():
                        loss_of(model, comm.rank, 100 + step).backward()
                losses.append(loss_of(model, comm.rank, step))
                losses[-1].backward()
                if stage == 0 and not step:
                    mine = torch.stack([one.grad.norm() for one in inner.parameters()])
                    assert len(set(comm.all_gather_bytes(mine.numpy().tobytes()))) == comm.size
                optimizer.step()
                optimizer.zero_grad()
            runs.append((torch.stack(losses).detach(), weights(inner), optimizer.bytes_sent))
        assert torch.equal(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])
        assert runs[0][2] == runs[1][2]


def models_with_parameters_of_no_optimizer_are_refused_or_warned_of(comm: Communicator) -> None:
    """What travels twice is said, once, in megabytes; attached, they would be left unsynchronised."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = thinwire.OneBitAdam(inner[0].parameters(), comm=comm)
    with pytest.warns(RuntimeWarning, match=r"DistributedDataParallel sends .* MB a step .*4 of the model's 6"):
        ddp_step(model, optimizer, comm, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp_step(model, optimizer, comm, 1)
    refused(ValueError, "4 of the model's 6 trainable parameters are not in this optimizer", optimizer.attach, model)


def ddp_step(model: nn.Module, optimizer: Any, comm: Communicator, step: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, comm.rank, step)
    loss.backward()
    optimizer.step()
    return loss.item()


ANYWHERE = (
    partial(exchange_equals_the_algorithm, steps=20),
    every_optimizer_agrees,
    stages_are_bit_identical,
    rounded_steps_agree,
)
BESIDE_DDP = (
    hook_trains_like_ddp,
    hook_with_none_averages_exactly,
    hook_passes_overflow_on_and_keeps_its_residuals,
    hook_resumes_with_its_residuals,
    attached_equals_alone,
    attached_obeys_ddps_no_sync,
    attached_scalers_back_off_together,
    attached_refuses_edited_gradients,
    ddp_is_found_and_attached_at_every_stage,
    models_with_parameters_of_no_optimizer_are_refused_or_warned_of,
)


def main() -> None:
    torch.set_num_threads(1)
    comm = thinwire.comm.init(timeout=600.0)
    for body in (*ANYWHERE, *tower.ALL, *(BESIDE_DDP if "ddp" in sys.argv else ())):
        body(comm)
    if comm.rank == 0:
        print(f"all held on {comm.backend} with {comm.size} ranks")


if __name__ == "__main__":
    main()
