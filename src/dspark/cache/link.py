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


class Answer(NamedTuple):
    """The states of a request's rows, one behind the other, and whether the target's process was asked to stop."""

    states: Tensor  # bf16 [S, m + 1, H]: the tapped layers, then the last hidden states
    log_normalizers: Tensor  # f32 [S]
    stop: bool


class TargetLink:
    """A trainer's end. Every method raises `CacheError` when the other process failed or is gone."""

    def __init__(self, target_rank: int, device: torch.device) -> None:
        self.target_rank = target_rank
        self._device = device

    def digests(self) -> tuple[str, str]:
        """Return the digests of the whole target and of its ends; call it once, before all else."""
        both = bytes(self._receive(torch.zeros(2 * _DIGEST_LENGTH, dtype=torch.uint8)).tolist()).decode()
        return both[:_DIGEST_LENGTH], both[_DIGEST_LENGTH:]

    def ask(self, indices: Sequence[int]) -> None:
        """Ask for rows; the answer to the request before must have been received."""
        try:
            for values in ([len(indices)], list(indices)):
                dist.send(torch.tensor(values, dtype=torch.int64), self.target_rank)
        except RuntimeError as error:
            raise self._gone(error) from None

    def answer(self, num_tokens: int, num_layers: int, hidden_size: int) -> Answer:
        """Receive the answer to the last request, whose rows have so many tokens together."""
        problem, stop = self._receive(torch.zeros(2, dtype=torch.int64)).tolist()
        if problem:
            raise CacheError(bytes(self._receive(torch.zeros(problem, dtype=torch.uint8)).tolist()).decode())
        shape = (num_tokens, num_layers + 1, hidden_size)
        states = self._receive(torch.empty(shape, dtype=torch.bfloat16, device=self._device))
        return Answer(states, self._receive(torch.empty(num_tokens, device=self._device)), bool(stop))

    def close(self) -> None:
        """Tell the other process that this one asks for nothing more."""
        dist.send(torch.zeros(1, dtype=torch.int64), self.target_rank)

    def _receive(self, tensor: Tensor) -> Tensor:
        try:
            dist.recv(tensor, self.target_rank)
        except RuntimeError as error:
            raise self._gone(error) from None
        return tensor

    def _gone(self, error: RuntimeError) -> CacheError:
        return CacheError(
            f"the target's process (rank {self.target_rank}) is gone, see what it wrote; started again, the run goes "
            f"on from its last state ({error})"
        )


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
        """Serve until every trainer has closed its end. Raises `CacheError` when one is gone, or for bad states.

        A thread waits for each trainer, so that one that is gone shows at once, whatever the others do.
        """
        for trainer in self._trainers:
            threading.Thread(target=self._attend, args=(trainer, device), daemon=True).start()
        for _ in self._trainers:
            error = self._ended.get()
            if isinstance(error, RuntimeError):
                raise CacheError(f"a trainer is gone, see what it wrote ({error})") from None
            if error is not None:
                raise error
        if self._failure is not None:
            raise self._failure

    def _attend(self, trainer: int, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._serve(trainer)
        finally:  # also for an error: whoever waits in `run` must learn of it
            self._ended.put(sys.exc_info()[1])

    def _serve(self, trainer: int) -> None:
        dist.send(_text("".join(self._digests)), trainer)
        while indices := _request(trainer):
            samples = self._samples(indices)
            if self._failure is not None:
                problem = _text(str(self._failure))
                dist.send(torch.tensor([len(problem), 0]), trainer)
                dist.send(problem, trainer)
                continue
            dist.send(torch.tensor([0, int(self.stop_requested)]), trainer)
            states = [torch.cat([s.features, s.last_hidden[:, None]], dim=1) for s in samples]
            dist.send(torch.cat(states), trainer)
            dist.send(torch.cat([s.log_normalizer for s in samples if s.log_normalizer is not None]), trainer)

    def _samples(self, indices: list[int]) -> Sequence[Sample]:
        with self._lock:
            if self._failure is None:
                try:
                    return self._load(indices)
                except CacheError as error:
                    self._failure = error
        return []


def _request(trainer: int) -> list[int]:
    """Wait for a trainer's next request: row numbers, or none when it is done."""
    count = torch.zeros(1, dtype=torch.int64)
    dist.recv(count, trainer)
    indices = torch.zeros(int(count), dtype=torch.int64)
    if len(indices):
        dist.recv(indices, trainer)
    return indices.tolist()


def _text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
