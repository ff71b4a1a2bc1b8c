"""One thread at a time calls an optimizer, a call that is cut short is not gone on from, and a fork leaves all to its
parent."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.launching import on_threads
from tests.optim.training import loss_of, weights
from tests.zero.test_gradient_edits import Case, begun, every_case
from thinwire.comm import CommunicationError, Communicator


def in_thread(body: Callable[[], object]) -> BaseException | None:
    """What it raises in a thread of its own."""
    raised: list[BaseException] = []
    compute_threads = torch.get_num_threads()  # on which it depends how sums are rounded

    def run() -> None:
        torch.set_num_threads(compute_threads)
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join()
    return raised[0] if raised else None


CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "backward": lambda model, optimizer: loss_of(model, 0, 51).backward(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@every_case
@on_threads(1)
def test_a_second_thread_is_refused_by_name_during_a_backward(comm: Communicator, case: Case, call: Any) -> None:
    model, optimizer = begun(comm, case)
    refused: list[BaseException | None] = []
    model[0].weight.register_hook(lambda gradient: refused.append(in_thread(lambda: call(model, optimizer))))

    def iterate() -> None:
        loss_of(model, 0, 50).backward()
        optimizer.step()

    if call is CALLS["backward"]:  # which has added to the gradients
        with pytest.raises(RuntimeError, match=r"beside a backward|was changed or dropped"):
            iterate()
        optimizer.zero_grad()
    else:
        iterate()
        assert optimizer.last_step.applied
    assert "in thread 'another' while thread" in str(refused[0])
    assert "is in backward() of the same optimizer" in str(refused[0])


@every_case
@on_threads(1)
def test_another_thread_may_go_on_between_steps(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    other, plain = begun(comm, case)
    assert in_thread(lambda: (loss_of(model, 0, 50).backward(), optimizer.step())) is None
    loss_of(other, 0, 50).backward()
    plain.step()
    assert torch.equal(weights(model), weights(other))


class CutShort:
    """Raises in a backward or a step, as Ctrl+C does, the first time that a method of an object is called."""

    def __init__(self, owner: Any, method: str) -> None:
        self._method, self._owner, self._name = getattr(owner, method), owner, method
        setattr(owner, method, self)

    def __call__(self, *given: Any) -> Any:
        setattr(self._owner, self._name, self._method)
        raise KeyboardInterrupt


@every_case
@on_threads(1)
def test_a_backward_cut_short_is_dropped_by_zero_grad_where_one_rank_is_alone(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    other, plain = begun(comm, case)
    CutShort(optimizer._home.watcher, "_take")
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 0, 50).backward()
    for go_on in (optimizer.step, lambda: loss_of(model, 0, 51).backward()):
        with pytest.raises(RuntimeError, match=r"backward\(\) did not come to its end: .*zero_grad\(\) first"):
            go_on()
    optimizer.state_dict()
    optimizer.zero_grad()
    for trained, by in ((model, optimizer), (other, plain)):
        loss_of(trained, 0, 51).backward()
        by.step()
    assert torch.equal(weights(model), weights(other))


@every_case
@on_threads(2)
def test_a_rank_whose_backward_was_cut_short_does_not_go_on(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    if comm.rank == 0:

        def iterate() -> None:
            loss_of(model, 0, 50).backward()
            optimizer.step()
            comm.barrier()

        with pytest.raises(CommunicationError, match="rank 1"):
            iterate()
        return
    CutShort(optimizer._home.watcher, "_take")
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 1, 50).backward()
    with pytest.raises(RuntimeError, match=r"was cut short on this rank.*end the job on every rank"):
        optimizer.zero_grad()


@every_case
@on_threads(1)
def test_a_step_cut_short_while_weights_move_is_the_last(comm: Communicator, case: Case) -> None:
    model, optimizer = begun(comm, case)
    loss_of(model, 0, 50).backward()
    home = optimizer._home
    if case.kind == "sharded":
        CutShort(home._parameters, "move_and_publish")
    else:
        CutShort(home.groups[0], "update")
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for go_on in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"step\(\) was cut short while weights were moving.*load a checkpoint"):
            go_on()


@every_case
@on_threads(1)
def test_one_rank_alone_goes_on_in_a_fork(comm: Communicator, case: Case) -> None:
    torch.set_num_threads(1)  # of this thread: a fork has none of the others that OpenMP would wait for
    model, optimizer = begun(comm, case)
    process = os.fork()
    if process == 0:
        try:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.close()
            os._exit(0 if optimizer.last_step.applied else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
