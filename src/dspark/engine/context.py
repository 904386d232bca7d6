"""The drafter's context, brought up late: requests that are not drafted for keep the features of their rows instead.

Making context costs a few percent of a plain round, which buys nothing while speculation does not pay. Rows held back
are injected together once somebody drafts for the request, when it ends (for the prefix cache), or when they are many.
A request's drafter cache is valid for exactly [0, context_len).
"""

from collections.abc import Sequence

import torch

from dspark.engine.request import Request
from dspark.engine.runner import Forward, Runner

MOST_HELD = 256  # rows of a request, some megabytes; then they are injected together


def hold(forward: Forward, requests: Sequence[Request], num_rows: Sequence[int], count: int) -> None:
    """Keep the committed row of each of the last `count` requests, which ran one row each; num_rows is 0 or 1."""
    if forward.is_packed:
        begin, step = forward.ran.num_real - count, 1
    else:
        step = forward.features.shape[1]
        begin = (len(requests) - count) * step
    # A copy: the rows of others need not stay as long, and a recorded round writes over its own.
    features = forward.features.flatten(0, 1)[begin::step][:count].clone()  # [count, m, H]
    for row, (request, kept) in enumerate(zip(requests[-count:], num_rows[-count:], strict=True)):
        if kept:
            request.held.append((features, row))


def catch_up(runner: Runner, requests: Sequence[Request]) -> None:
    """Inject all rows that these requests hold back."""
    requests = [request for request in requests if request.held]
    if not requests:
        return
    size, device = runner.block_size, runner.device
    positions: list[int] = []
    slots: list[int] = []
    next_ids: list[int] = []
    for request in requests:
        begin, end = request.context_len, request.seq_len
        positions += range(begin, end)
        slots += [request.block_table[p // size] * size + p % size for p in range(begin, end)]
        next_ids += request.ids(begin + 1, end + 1)
    features = torch.stack([features[row] for request in requests for features, row in request.held])
    following, at, into = (torch.tensor(column, device=device) for column in (next_ids, positions, slots))
    runner.write_context(features, following, at, into)
    for request in requests:
        request.held.clear()
