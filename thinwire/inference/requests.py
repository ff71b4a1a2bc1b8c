"""Requests of any lengths, gathered into batches by a thread: a scheduler inside one process, not a server."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class QueueFullError(RuntimeError):
    """A request that was refused, as too many wait."""


class QueueClosedError(RuntimeError):
    """A request to a queue that takes none any more."""


@dataclass(frozen=True)
class _Request:
    tokens: Tensor
    answer: Future[dict[str, Tensor]]


class RequestQueue:
    """Batches for `model`, which takes `input_ids` and `attention_mask` [B, S] and gives outputs by name.

    A batch goes as soon as `max_tokens` wait, or its first request has waited for `wait` seconds. `device`: the
    model's, where answers are too; `longest`: tokens that it can read.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        device: torch.device,
        longest: int | None,
        *,
        max_tokens: int,
        wait: float,
        size: int,
    ) -> None:
        for name, value, least in (("max_tokens", max_tokens, 1), ("wait", wait, 0), ("size", size, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self._model, self._device, self._longest = model, device, longest
        self._max_tokens, self._wait = max_tokens, wait
        self._waiting: queue.Queue[_Request | None] = queue.Queue(size)
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._serve, name="thinwire-requests", daemon=True)
        self._thread.start()

    def submit(self, tokens: Sequence[int] | Tensor) -> Future[dict[str, Tensor]]:
        """Have one request answered: the model's outputs by name, those a token cut to [S, ...].

        Raises ValueError for tokens that are no row of at least one, or more than the model reads; `QueueFullError`,
        `QueueClosedError`. What the model raises is the future's exception.
        """
        row = torch.as_tensor(tokens)
        if row.dim() != 1 or not len(row) or row.is_floating_point():
            raise ValueError(f"expected token numbers [S], at least one, got {row.dtype} {list(row.shape)}")
        if self._longest is not None and len(row) > self._longest:
            raise ValueError(f"a request of {len(row)} tokens, and the model reads {self._longest}: cut it")
        request = _Request(row.long(), Future())
        with self._lock:  # nothing may come behind the end
            if self._closed:
                raise QueueClosedError("the queue is closed")
            try:
                self._waiting.put_nowait(request)
            except queue.Full:
                waiting = self._waiting.maxsize
                raise QueueFullError(f"{waiting} requests wait: send fewer, or give queue() a larger size") from None
        return request.answer

    def close(self) -> None:
        """Take no more requests, answer those that wait, and end."""
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._waiting.put(None)
        self._thread.join()

    def __enter__(self) -> RequestQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        last = False
        held: _Request | None = None  # the first that did not fit into the batch before
        while not last or held is not None:
            first = held or self._waiting.get()
            held = None
            if first is None:
                return
            batch, tokens, until = [first], len(first.tokens), time.monotonic() + self._wait
            while tokens < self._max_tokens and not last:
                try:
                    request = self._waiting.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if request is None:
                    last = True
                elif tokens + len(request.tokens) > self._max_tokens:
                    held = request
                    break
                else:
                    batch.append(request)
                    tokens += len(request.tokens)
            self._answer([one for one in batch if one.answer.set_running_or_notify_cancel()])

    def _answer(self, batch: list[_Request]) -> None:
        if not batch:
            return
        lengths = [len(one.tokens) for one in batch]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        padded = torch.nn.utils.rnn.pad_sequence([one.tokens for one in batch], batch_first=True)
        try:
            outputs = self._model(input_ids=padded.to(self._device), attention_mask=mask.to(self._device, torch.int64))
            named = {"output": outputs} if isinstance(outputs, Tensor) else dict(outputs)
            for row, (request, length) in enumerate(zip(batch, lengths, strict=True)):
                own = {
                    name: _own(one[row], length, max(lengths)) for name, one in named.items() if torch.is_tensor(one)
                }
                request.answer.set_result(own)
        except Exception as error:  # whatever a model raises is an answer
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)


def _own(values: Tensor, length: int, longest: int) -> Tensor:
    """A request's part of a row, as memory of its own."""
    by_token = values.dim() > 1 and values.shape[0] == longest
    return (values[:length] if by_token else values).clone()
