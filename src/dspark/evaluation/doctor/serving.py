"""The engine's side: the laws that its drafts are drawn from, and what its rounds accept.

Shapes: N places where a block is drafted, G draft slots, S tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, Request, SamplingParams
from dspark.engine.runner import Runner, num_window_positions, window_of
from dspark.engine.text import TextStream
from dspark.evaluation.doctor.laws import Observation, draft_logits
from dspark.evaluation.doctor.pair import Pair
from dspark.models.target import Target

LAST_ROWS = 2  # context rows that come as a verified round's do, after the prefill of the others


class Place(NamedTuple):
    """An anchor of an observation's row."""

    row: int
    anchor: int


class ServedBlocks(NamedTuple):
    """What the engine drafted at some places: tokens i64 [N, G], drawn from laws f32 [N, G, Vd]."""

    places: list[Place]
    tokens: Tensor
    laws: Tensor


def answer(pair: Pair, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Completion]:
    """Greedy answers of the engine, with a record of each round."""
    longest = max(map(len, prompts)) + num_tokens
    settings = pair.settings.replace(max_batch=len(prompts), max_length=longest + 1, record_rounds=True)
    return Engine(pair.target, pair.serving, settings).generate(prompts, SamplingParams(max_tokens=num_tokens))


@torch.inference_mode()
def serve_blocks(pair: Pair, observation: Observation, places: list[Place]) -> ServedBlocks:
    """Let the engine's runner prefill, inject and draft one block at each place, sampled at temperature 1."""
    settings, window, used, requests = pair.settings, num_window_positions(pair.serving), 1, []
    for row, anchor in places:
        count = settings.blocks_for(anchor + window)
        ids = observation.rows[row].ids.tolist()
        requests.append(_request(pair.target, ids[: max(1, anchor - LAST_ROWS) + 1], list(range(used, used + count))))
        used += count
    runner = Runner(pair.target.decoder, pair.serving, settings, used)
    _run(runner, requests)
    for request, (row, anchor) in zip(requests, places, strict=True):  # what a verified round commits comes by itself
        request.token_ids += observation.rows[row].ids[request.num_known + 1 : anchor + 1].tolist()
    _run(runner, [request for request in requests if request.seq_len < request.num_known])
    block = runner.draft(window_of(requests, runner.device))
    return ServedBlocks(places, block.tokens, block.probs)


@torch.inference_mode()
def trained_laws(drafter: Drafter, observation: Observation, served: ServedBlocks) -> Tensor:
    """What the training forward makes of the same blocks, fed with the tokens that the engine drew: [N, G, Vd]."""
    laws = []
    for (row, anchor), tokens in zip(served.places, served.tokens, strict=True):
        known = observation.rows[row]
        ids = torch.cat([known.ids[: anchor + 1], tokens])
        context = observation.features(known, drafter.config.target_layer_ids)[:, :anchor]
        features = F.pad(context, (0, 0, 0, 0, 0, len(ids) - anchor))  # what no block sees
        laws.append(draft_logits(drafter, ids[None], features, torch.tensor([[anchor]]))[0, 0].softmax(-1))
    return torch.stack(laws)


def _request(target: Target, ids: list[int], block_table: list[int]) -> Request:
    """A request that has put out the last of `ids` and run none of them."""
    return Request(
        request_id="",
        prompt_ids=ids[:-1],
        params=SamplingParams(temperature=1.0),
        seed=len(ids),
        limit=target.config.max_position_embeddings,
        stop_token_ids=frozenset(),
        stream=TextStream(target.tokenizer.backend_tokenizer.decode),
        speculates=True,
        token_ids=ids[-1:],
        block_table=block_table,
    )


def _run(runner: Runner, requests: list[Request]) -> None:
    """Run the known tokens that have not run yet through the target, and give the drafter their states."""
    if not requests:
        return
    rows = [request.ids(request.seq_len, request.num_known) for request in requests]
    counts = list(map(len, rows))
    token_ids = torch.tensor([ids + [0] * (max(counts) - len(ids)) for ids in rows], device=runner.device)
    forward = runner.forward(window_of(requests, runner.device), token_ids, counts, capture=True)
    for request, count in zip(requests, counts, strict=True):
        request.seq_len += count
    runner.inject(forward, requests, counts)
