"""What must hold beside DistributedDataParallel: the hook, and 1-bit Adam attached to a DDP model."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.optim.training import batch, exchange_comm, loss_of, make_model, make_optimizer, train, weights
from thinwire.comm import Communicator


def hook_trains_like_ddp(comm: Communicator) -> None:
    """DDP with the hook and torch's own optimizer: a falling loss, the same bits everywhere, few bytes."""
    for codec in ("sign1", "stat2", "int4", "fp8", "int8", "bf16", "none"):
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)
        state = thinwire.compress.CompressionState(comm, codec=codec, block_size=64, start_step=5)
        model.register_comm_hook(state, thinwire.compress.ddp_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        losses = [ddp_step(model, optimizer, comm, step) for step in range(50)]
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])
        assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
        assert state.step == 50
        assert len(state._exchanges) > 1


def hook_with_none_averages_exactly(comm: Communicator) -> None:
    """The hook that compresses nothing gives DDP's own gradients."""
    gradients = []
    for hooked in (False, True):
        model = DistributedDataParallel(make_model())
        if hooked:
            state = thinwire.compress.CompressionState(comm, codec="none")
            model.register_comm_hook(state, thinwire.compress.ddp_hook)
        loss_of(model, comm.rank, 0).backward()
        gradients.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def hook_passes_overflow_on_and_keeps_its_residuals(comm: Communicator) -> None:
    """One rank's NaN reaches every rank's gradients; the residuals stay finite."""
    model = DistributedDataParallel(make_model())
    state = thinwire.compress.CompressionState(comm, block_size=64, start_step=1)
    model.register_comm_hook(state, thinwire.compress.ddp_hook)
    for step in range(4):
        model.zero_grad()
        (loss_of(model, comm.rank, step) * (float("nan") if step == 2 and comm.rank == 0 else 1.0)).backward()
        finite = all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
        assert finite == (step != 2)
        assert all(bool(torch.isfinite(e.payload).all()) for e in state._exchanges.values()) or step == 2


def hook_resumes_with_its_residuals(comm: Communicator) -> None:
    """One step later than the run that went on, as the first one after a resume is exact, with the same bits."""

    def hooked(codec: str) -> tuple[DistributedDataParallel, thinwire.compress.CompressionState]:
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)
        state = thinwire.compress.CompressionState(comm, codec=codec, block_size=64)
        model.register_comm_hook(state, thinwire.compress.ddp_hook)
        return model, state

    def averages(model: DistributedDataParallel, step: int) -> torch.Tensor:
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])

    for codec in ("sign1", "stat2", "int4", "fp8"):
        model, state = hooked(codec)
        for step in range(4):
            averages(model, step)
        saved = copy.deepcopy(state.state_dict())
        assert len(saved["buckets"]) > 1
        wanted = averages(model, 9)
        model, state = hooked(codec)
        state.load_state_dict(saved)
        exact, plain = averages(model, 5), averages(DistributedDataParallel(make_model()), 5)
        torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-7)
        assert torch.equal(averages(model, 9), wanted)
        with pytest.raises(ValueError, match="saved with codec="):
            hooked("int8")[1].load_state_dict(saved)
        with pytest.raises(ValueError, match="saved with rank="):
            state.load_state_dict({**saved, "rank": comm.size - 1})  # which the last rank's is
        model, state = hooked(codec)
        state.load_state_dict({**saved, "buckets": {0: {**saved["buckets"][0], "numel": 3}}})
        averages(model, 0)
        with pytest.warns(RuntimeWarning, match="bucket 0 has .* saved with 3"):
            averages(model, 1)


def attached_equals_alone(comm: Communicator) -> None:
    """1-bit Adam attached to a DDP model gives the weights it gives without DDP, and DDP sends nothing."""
    alone = make_model()
    train(alone, make_optimizer(alone, comm), range(40))
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = make_optimizer(inner, comm).attach(model)
    losses = []
    for step in range(40):
        losses.append(ddp_step(model, optimizer, comm, step))
    torch.testing.assert_close(weights(inner), weights(alone), rtol=1e-4, atol=1e-5)
    assert len(set(comm.all_gather_bytes(weights(inner).numpy().tobytes()))) == 1


def attached_obeys_ddps_no_sync(comm: Communicator) -> None:
    """Gradients accumulated under DDP's no_sync leave once, with the last backward."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = make_optimizer(inner, comm).attach(model)
    calls = []
    for step in range(3):
        optimizer.zero_grad()
        before = exchange_comm(optimizer).traffic.calls
        with model.no_sync():
            loss_of(model, comm.rank, 2 * step).backward()
        assert exchange_comm(optimizer).traffic.calls == before
        loss_of(model, comm.rank, 2 * step + 1).backward()
        optimizer.step()
        calls.append(exchange_comm(optimizer).traffic.calls - before)
    assert calls == [2, 2, 2]


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
        assert len(set(comm.all_gather_bytes(weights(inner).numpy().tobytes()))) == 1


def attached_refuses_edited_gradients(comm: Communicator) -> None:
    """Clipping after backward is an error beside DDP too."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = make_optimizer(inner, comm).attach(model)
    loss_of(model, comm.rank, 0).backward()
    torch.nn.utils.clip_grad_norm_(inner.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="changed or dropped"):
        optimizer.step()


def ddp_is_found_and_attached_at_every_stage(comm: Communicator) -> None:
    """A DDP model that nobody attached sends nothing from the first backward on, and its no_sync is obeyed."""
    for stage in (0, 1, 2):
        runs = []
        for attached in (True, False):
            inner = make_model()
            model = DistributedDataParallel(inner)
            optimizer = make_optimizer(inner, comm, stage=stage)
            if attached:
                optimizer.attach(model)
            losses = []
            for step in range(16):
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


def ddp_that_cannot_be_stopped_is_warned_of(comm: Communicator) -> None:
    """What travels twice is said, once, in megabytes."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = thinwire.OneBitAdam(inner[0].parameters(), comm=comm)
    with pytest.warns(RuntimeWarning, match=r"DistributedDataParallel sends .* MB a step .*4 of the model's 6"):
        ddp_step(model, optimizer, comm, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp_step(model, optimizer, comm, 1)


def attach_refuses_parameters_it_does_not_hold(comm: Communicator) -> None:
    """A DDP model with parameters that are not the optimizer's would leave them unsynchronised."""
    inner = make_model()
    optimizer = thinwire.OneBitAdam(inner[0].parameters(), comm=comm)
    with pytest.raises(ValueError, match="4 of the model's 6 trainable parameters are not in this optimizer"):
        optimizer.attach(DistributedDataParallel(inner))


def ddp_step(model, optimizer, comm: Communicator, step: int) -> float:
    optimizer.zero_grad()
    inputs, wanted = batch(comm.rank, step)
    loss = (model(inputs) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


ALL = (
    hook_trains_like_ddp,
    hook_with_none_averages_exactly,
    hook_passes_overflow_on_and_keeps_its_residuals,
    hook_resumes_with_its_residuals,
    attached_equals_alone,
    attached_obeys_ddps_no_sync,
    attached_scalers_back_off_together,
    attached_refuses_edited_gradients,
    ddp_is_found_and_attached_at_every_stage,
    ddp_that_cannot_be_stopped_is_warned_of,
    attach_refuses_parameters_it_does_not_hold,
)
