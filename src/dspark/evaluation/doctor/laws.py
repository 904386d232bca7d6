"""The training forward, and how far its drafts are what the target writes.

Shapes: B rows, S tokens, P positions of an answer, A or N anchors, G draft slots, n tapped states, H hidden size, V
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.models.config import RopeConfig
from dspark.models.decoder import Decoder
from dspark.models.layers import softcap
from dspark.models.rope import RotaryEmbedding
from dspark.models.states import DecoderStates
from dspark.spec.sampling import argmax

CHUNK = 1 << 24  # draft logits that exist at once


class AnsweredRow(NamedTuple):
    """A prompt with the target's greedy answer, and what the target made of it in one forward."""

    ids: Tensor  # i64 [S]
    start: int  # where the answer begins: positions start..S-1 are its P
    states: Tensor  # [S, n, H], outputs of the observation's layers
    last_hidden: Tensor  # [P, H] of the answer, before the final norm
    law: Tensor  # f32 [P, V]: what the target writes after each position of the answer


class Observation(NamedTuple):
    """Rows of one target, with its states at `layers` (ids as in `target_layer_ids`)."""

    decoder: Decoder
    rows: list[AnsweredRow]
    layers: tuple[int, ...]

    def features(self, row: AnsweredRow, layer_ids: Sequence[int]) -> Tensor:
        """The states that a drafter reads: [1, S, m, H]."""
        return row.states[None, :, [self.layers.index(layer) for layer in layer_ids]]

    def without_norm(self) -> Observation:
        """The same rows, as if the LM head read states before the final norm."""
        weight, cap = self.decoder.lm_head_weight, self.decoder.config.final_logit_softcapping
        laws = [softcap(F.linear(row.last_hidden, weight), cap).float().softmax(-1) for row in self.rows]
        return self._replace(rows=[row._replace(law=law) for row, law in zip(self.rows, laws, strict=True)])

    def with_rope(self, rope: RopeConfig) -> Observation:
        """The same texts through the target with other rope settings (of its full-attention layers)."""
        rotaries = self.decoder.rotaries
        own = rotaries[0]
        rotaries[0] = RotaryEmbedding(rope, own.head_dim)
        try:
            return observe(self.decoder, [(row.ids.tolist(), row.start) for row in self.rows], self.layers)
        finally:
            rotaries[0] = own


class Score(NamedTuple):
    """Drafts held against the target, by anchor and slot; NaN where the answer ends before the slot's token."""

    agreement: Tensor  # f32 [N, G]: 1 where the draft's argmax is the target's
    overlap: Tensor  # f32 [N, G]: sum of min(p, q), the chance that a sampled draft is accepted
    position: Tensor  # i64 [N] of the anchors: tokens of context

    @property
    def acceptance(self) -> float:
        """Mean agreement over slots and anchors."""
        return float(self.agreement.nanmean())

    @property
    def runs(self) -> Tensor:
        """Drafts that greedy decoding would accept at each anchor: [N]."""
        return self.agreement.nan_to_num(0).cumprod(1).sum(1)


@torch.inference_mode()
def observe(decoder: Decoder, texts: Sequence[tuple[Sequence[int], int]], layers: tuple[int, ...]) -> Observation:
    """Run texts (token ids, where the answer begins) through the target, one at a time."""
    source, rows = DecoderStates(decoder), []
    for ids, start in texts:
        states = source([ids], layers)[0]
        last = states.last_hidden[start:]
        law = decoder.logits(last).float().softmax(-1)
        rows.append(AnsweredRow(torch.tensor(ids), start, states.taps, last, law))
    return Observation(decoder, rows, layers)


def anchors_of(row: AnsweredRow, limit: int) -> Tensor:
    """Up to `limit` anchors, evenly spread over the answer: positions with a context, and a token behind them."""
    places = torch.arange(max(row.start, 2), len(row.ids) - 1)
    if len(places) > limit:
        places = places[torch.linspace(0, len(places) - 1, limit).long()]
    return places


def draft_logits(drafter: Drafter, token_ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """The training forward: `train_hidden` and heads, fed with the row's own tokens.

    token_ids [B, S], features [B, S, m, H], anchors [B, A] -> f32 [B, A, G, Vd].
    """
    hidden = drafter.train_hidden(token_ids, features, anchors, torch.ones_like(anchors, dtype=torch.bool))
    weight, head = drafter.lm_head_weight.to(hidden.dtype), drafter.markov_head
    logits = softcap(F.linear(hidden, weight), drafter.config.final_logit_softcapping).float()
    if head is None:
        return logits
    slots = anchors[..., None] + torch.arange(hidden.shape[2], device=anchors.device)  # [B, A, G]
    slots = slots.clamp(max=token_ids.shape[1] - 1)
    previous = token_ids.gather(1, slots.flatten(1)).view_as(slots)
    feature, _ = head.block(previous.flatten(0, 1), hidden.flatten(0, 1))
    bias: Tensor = head.markov_w2(feature)
    return logits + bias.view_as(logits).float()


@torch.inference_mode()
def score(drafter: Drafter, observation: Observation, anchors: Sequence[Tensor]) -> Score:
    """Hold the training forward's drafts at each row's anchors against what the target writes there."""
    parts = []
    for row, places in zip(observation.rows, anchors, strict=True):
        features = observation.features(row, drafter.config.target_layer_ids)
        chunk = max(1, CHUNK // (drafter.num_drafts * drafter.config.num_draft_logits))
        for some in torch.split(places, chunk):
            logits = draft_logits(drafter, row.ids[None], features, some[None])[0]
            parts.append((*_judge(logits, row, some, drafter.token_ids), some))
    agreement, overlap, position = (torch.cat(column) for column in zip(*parts, strict=True))
    return Score(agreement, overlap, position)


def _judge(logits: Tensor, row: AnsweredRow, anchors: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft logits [A, G, Vd] -> agreement and overlap [A, G]."""
    place = anchors[:, None] - row.start + torch.arange(logits.shape[1])  # [A, G], of the answer
    beyond = place >= len(row.law)
    place = place.clamp(max=len(row.law) - 1)
    law = row.law if token_ids is None else row.law[:, token_ids]
    choice = argmax(logits)
    choice = choice if token_ids is None else token_ids[choice]
    agreement = (choice == argmax(row.law)[place]).float()
    overlap = torch.minimum(logits.softmax(-1), law[place]).sum(-1)
    return agreement.masked_fill(beyond, torch.nan), overlap.masked_fill(beyond, torch.nan)
