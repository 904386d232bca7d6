"""Log probabilities of the tokens that a round puts out, for the requests that ask.

Token j of a round is judged by row j of its request, whether it is a draft that was accepted or the bonus.
Shapes: B requests, T rows a request, V vocabulary, n tokens.
"""

import torch
from torch import Tensor

from dspark.engine.request import Request, TokenLogprob
from dspark.spec.sampling import probabilities
from dspark.spec.types import SamplingRows


def token_logprobs(
    requests: list[Request], tokens: list[list[int]], raw: Tensor, edited: Tensor, rows: SamplingRows
) -> list[list[TokenLogprob]]:
    """One entry a token for each request that asks, none for the others.

    raw, edited: the target's rows [B, T, V] before and after the edits. "raw" log probabilities are of the model's own
    law: no edit, no temperature, no filter. "processed" ones are of the law that the token was drawn from, and under
    greedy decoding of the edited rows at temperature 1.
    """
    found: list[list[TokenLogprob]] = [[] for _ in requests]
    for b, (request, new) in enumerate(zip(requests, tokens, strict=True)):
        wanted = request.params.logprobs
        if wanted is None:
            continue
        new = [token for token in new if token >= 0]  # -1: the last row was broken
        if request.params.logprobs_mode == "raw":
            law = raw[b, : len(new)].float().log_softmax(-1)
        else:
            one = rows.select(torch.tensor([b], device=raw.device))
            one = one._replace(temperature=torch.where(one.greedy, 1.0, one.temperature))
            law = probabilities(edited[b : b + 1, : len(new)], one)[0].log()
        found[b] = _listed(law, new, wanted)
    return found


def _listed(law: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
    """Read the tokens' own entries and the largest ones from log laws [n, V]."""
    own = law.gather(1, torch.tensor(tokens, dtype=torch.long, device=law.device).unsqueeze(1)).squeeze(1).tolist()
    top = law.topk(min(num_top, law.shape[1]))
    listed = []
    for token, logprob, ids, values in zip(tokens, own, top.indices.tolist(), top.values.tolist(), strict=True):
        possible = [(i, value) for i, value in zip(ids, values, strict=True) if value > -float("inf")]
        listed.append(TokenLogprob(token, logprob, possible))
    return listed
