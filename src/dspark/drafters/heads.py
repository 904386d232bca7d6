"""Sequential heads and the confidence head of a block drafter.

Shapes: B requests or blocks, G draft slots, H hidden, r Markov rank, V vocabulary, Vd draft vocabulary.
Source: DSpark paper equations 4-8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig


class MarkovHead(nn.Module):
    """A bias on the draft logits that depends on the previous token (and, gated or RNN, on the hidden state).

    The bias of slot k is `markov_w2(feature_k)`, Vd wide. The feature, r wide, is
      vanilla  W1[prev]
      gated    sigmoid(Wg [h_k ; W1[prev]]) * W1[prev]
      rnn      tanh(o_k), with z = [s ; W1[prev] ; h_k], (g, c, o) = W z, s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov_head_type
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_logits, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def initial_state(self, batch: int, like: Tensor) -> Tensor | None:
        """The state before slot 0: [batch, r] zeros for the RNN head, None for the others."""
        return like.new_zeros(batch, self.rank) if self.kind == "rnn" else None

    def step(self, prev: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """One slot: prev [B] token ids, hidden [B, H] -> (feature [B, r], W1[prev] [B, r], next state)."""
        embedded = self.markov_w1(prev)
        if self.kind == "vanilla":
            return embedded, embedded, None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
            return gate * embedded, embedded, None
        assert state is not None
        g, c, o = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(g)
        return torch.tanh(o), embedded, keep * state + (1 - keep) * torch.tanh(c)

    def block(self, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """All slots, previous tokens known: prev [B, G], hidden [B, G, H] -> features and W1[prev] [B, G, r]."""
        if self.kind != "rnn":
            feature, embedded, _ = self.step(prev, hidden, None)
            return feature, embedded
        state = self.initial_state(prev.shape[0], hidden)
        features, embeddeds = [], []
        for k in range(prev.shape[1]):
            feature, embedded, state = self.step(prev[:, k], hidden[:, k], state)
            features.append(feature)
            embeddeds.append(embedded)
        return torch.stack(features, dim=1), torch.stack(embeddeds, dim=1)


class ConfidenceHead(nn.Module):
    """Estimates the logit of P(draft k is accepted | all before it were), in fp32 (paper equation 7).

    It reads the slot's hidden state and, with the Markov feature, W1 of the PREVIOUS token: never draft k itself, which
    is what lets a scheduler act on it without bending the output law.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden [..., H], embedded W1[prev] [..., r] or None -> logits [...] fp32."""
        x = hidden
        if self.with_markov:
            assert embedded is not None
            x = torch.cat([hidden, embedded], dim=-1)
        weight, bias = self.proj.weight.float(), self.proj.bias.float()
        return nn.functional.linear(x.float(), weight, bias).squeeze(-1)
