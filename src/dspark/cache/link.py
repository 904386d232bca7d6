"""How a trainer and the process that runs its target talk: row numbers one way, states the other, point to point.

Control goes through CPU tensors, states through tensors of the trainer's device; one request is under way at a time.

Shapes: S tokens of all rows of a request, m tapped layers, H hidden size.
"""

import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.cache.format import Sample
from dspark.errors import CacheError

_DIGEST_LENGTH = 16  # characters
_CLOSED = -1  # instead of a number of rows


class Answer(NamedTuple):
    """The states of a request's rows, one behind the other, and whether the target's process was asked to stop."""

    states: Tensor  # bf16 [S, m + 1, H]: the tapped layers, then the last hidden states
    log_normalizers: Tensor  # f32 [S]
    stop: bool


class TargetLink:
    """A trainer's end. Every method raises `CacheError` when the other process failed or is gone."""

    def __init__(self, target_rank: int, device: torch.device) -> None:
        self._rank, self._device = target_rank, device

    def digests(self) -> tuple[str, str]:
        """Return the digests of the whole target and of its ends; call it once, before all else."""
        both = self._text(2 * _DIGEST_LENGTH)
        return both[:_DIGEST_LENGTH], both[_DIGEST_LENGTH:]

    def ask(self, indices: Sequence[int]) -> None:
        """Ask for rows, or for none; the answer to the last request must have been received."""
        _send(torch.tensor([len(indices)]), self._rank)
        if indices:
            _send(torch.tensor(list(indices)), self._rank)

    def close(self) -> None:
        """Say that nothing more will be asked for."""
        _send(torch.tensor([_CLOSED]), self._rank)

    def answer(self, num_tokens: int, num_layers: int, hidden_size: int) -> Answer:
        """Receive the answer to the last request, whose rows have so many tokens together."""
        problem, stop = _receive(torch.zeros(2, dtype=torch.int64), self._rank).tolist()
        if problem:
            raise CacheError(self._text(problem))
        states = torch.zeros(num_tokens, num_layers + 1, hidden_size, dtype=torch.bfloat16, device=self._device)
        normalizers = torch.zeros(num_tokens, device=self._device)
        if num_tokens:
            _receive(states, self._rank)
            _receive(normalizers, self._rank)
        return Answer(states, normalizers, bool(stop))

    def _text(self, length: int) -> str:
        return bytes(_receive(torch.zeros(length, dtype=torch.uint8), self._rank).tolist()).decode()


class TargetServer:
    """The other end: answers the requests of several trainers with what `load` gives, until none has any left."""

    def __init__(
        self, load: Callable[[Sequence[int]], Sequence[Sample]], digests: tuple[str, str], trainers: Iterable[int]
    ) -> None:
        self._load, self._digests, self._trainers = load, digests, list(trainers)
        self._lock = threading.Lock()  # the target runs for one trainer at a time
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._failure: CacheError | None = None
        self.stop_requested = False

    def run(self, device: torch.device) -> None:
        """Serve until no trainer asks for more. Raises `CacheError` when one is gone, or for states of no target.

        A thread waits for each trainer, so that one that is gone shows at once, whatever the others do.
        """
        for trainer in self._trainers:
            threading.Thread(target=self._attend, args=(trainer, device), daemon=True).start()
        for _ in self._trainers:
            error = self._ended.get()
            if error is not None:
                raise error
        if self._failure is not None:
            raise self._failure

    def _attend(self, trainer: int, device: torch.device) -> None:
        gone: CacheError | None = None
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._serve(trainer)
        except CacheError as error:
            gone = error
        finally:  # whatever the error, `run` must learn of it
            self._ended.put(gone or sys.exc_info()[1])

    def _serve(self, trainer: int) -> None:
        _send(_bytes("".join(self._digests)), trainer)
        while (count := int(_receive(torch.zeros(1, dtype=torch.int64), trainer))) != _CLOSED:
            rows = _receive(torch.zeros(count, dtype=torch.int64), trainer).tolist() if count else []
            samples = self._samples(rows) if rows else []
            if self._failure is not None:
                problem = _bytes(str(self._failure))
                _send(torch.tensor([len(problem), 0]), trainer)
                _send(problem, trainer)
                continue
            _send(torch.tensor([0, int(self.stop_requested)]), trainer)
            if not rows:
                continue
            states = [torch.cat([s.features, s.last_hidden[:, None]], dim=1) for s in samples]
            _send(torch.cat(states), trainer)
            _send(torch.cat([s.log_normalizer for s in samples if s.log_normalizer is not None]), trainer)

    def _samples(self, indices: list[int]) -> Sequence[Sample]:
        with self._lock:
            if self._failure is None:
                try:
                    return self._load(indices)
                except CacheError as error:
                    self._failure = error
        return []


def _send(tensor: Tensor, rank: int) -> None:
    try:
        dist.send(tensor, rank)
    except RuntimeError as error:
        raise _gone(rank, error) from None


def _receive(tensor: Tensor, rank: int) -> Tensor:
    try:
        dist.recv(tensor, rank)
    except RuntimeError as error:
        raise _gone(rank, error) from None
    return tensor


def _gone(rank: int, error: RuntimeError) -> CacheError:
    reason = str(error).split(". ")[0]
    return CacheError(
        f"the process of rank {rank} is gone: see what it wrote; started again, the run goes on from its last state "
        f"({reason})"
    )


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
