"""Importing this loads the compiled kernels: it trains each optimizer of the registry on two ranks."""

import torch
from torch import nn

from tests.optim.subject import FREEZE, SUBJECTS, Subject, dyadic
from thinwire.comm import Communicator, threads


def _train(subject: Subject, comm: Communicator) -> None:
    """Gradients are set: a backward would start a thread of torch's, which no fork survives."""
    model = nn.Linear(40, 5)
    optimizer = subject.build(model, comm)
    for step in range(FREEZE + 3):
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), dyadic(model, comm.rank, step), strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


for _subject in SUBJECTS:
    threads.run(lambda comm, one=_subject: _train(one, comm), 2)
