"""What every drafter is: bound to one target, drawing drafts with their exact law, trained on anchors.

Shapes: B requests or sequences, N flat rows, A anchors, G draft slots, S tokens, H hidden, m tapped layers, V
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import FeatureFusion
from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, MarkovHead
from dspark.errors import CheckpointError
from dspark.models.attention import AttentionBatch
from dspark.models.ends import TargetEnds
from dspark.models.kv_cache import PagedKVCache
from dspark.models.layers import softcap
from dspark.models.linear import pack_linears
from dspark.models.sharding import Shards
from dspark.models.weights import parameters_digest
from dspark.spec.sampling import Role, argmax, categorical, probabilities, uniform
from dspark.spec.types import DraftBlock, SamplingRows


class Drafter(nn.Module, ABC):
    """A drafter bound to one target, whose embedding (and, unless it has its own, LM head) it borrows frozen.

    `token_ids` [Vd] maps a draft index to a target id when the draft vocabulary is reduced, else None.
    Raises CheckpointError when config and target disagree on hidden size or vocabulary.
    """

    backbone: FeatureFusion
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    token_ids: Tensor | None
    context_reads_next: bool = False  # whether what `inject` writes for a row depends on the token after it

    def __init__(self, config: DrafterConfig, target: TargetEnds, token_ids: Tensor | None = None) -> None:
        super().__init__()
        check_target(config, target, token_ids)
        self.config = config
        self.markov_head = None
        self.confidence_head = None
        self.shards: Shards | None = None  # where several processes share it
        self.digest: str | None = None  # 16 hex digits that identify weights and conventions, once prepared
        self.register_buffer("token_ids", token_ids, persistent=False)
        # Borrowed, so kept out of parameters() and of the state dict.
        self._borrowed = _Borrowed(target, token_ids)

    @property
    def num_drafts(self) -> int:
        """Draft tokens per round, gamma."""
        return self.config.num_drafts

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head rows of the draft logits, [Vd, H]: the target's, frozen, unless the drafter has its own."""
        return self.target_lm_head_weight

    @property
    def target_lm_head_weight(self) -> Tensor:
        """The target's frozen LM head rows of the draft vocabulary, [Vd, H]."""
        return self._borrowed.lm_head_weight

    @property
    def embedding_weight(self) -> Tensor:
        """The target's frozen embedding table, [V, H], as it is stored."""
        return self._borrowed.embedding

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.backbone.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.norm.weight.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target embedding of token ids, in the drafter's dtype: [...] -> [..., H]."""
        embedded: Tensor = self._borrowed.embed(token_ids)
        return embedded.to(self.dtype)

    def prepare(self, pack: bool = True) -> Self:
        """Freeze for serving: no gradients, the target's dtype (its bytes are the cost), linears packed if wanted."""
        self.requires_grad_(False).eval()
        self.backbone.fold_scale()
        self.digest = self._identify()
        for parameter in self.parameters():
            parameter.data = parameter.data.to(self.embedding_weight.dtype)
        rows, width = self.lm_head_weight.shape
        head = nn.Linear(width, rows, bias=False, device="meta")
        head.weight = nn.Parameter(self.lm_head_weight.detach().to(self.dtype), requires_grad=False)
        self.replace_head(head)
        if pack:
            self.pack()
        return self

    def replace_head(self, head: nn.Module) -> None:
        """Serve with this module for the LM head: final normed hidden states [..., H] -> logits [..., Vd]."""
        self._borrowed.head = nn.Sequential(head)

    def pack(self) -> None:
        """Lay the linears out for fast inference on this CPU."""
        pack_linears(self)
        pack_linears(self._borrowed.head)

    def _identify(self) -> str:
        """What a calibration belongs to: the same in every file and dtype of one drafter.

        It leaves the config's own digest out, since that changes with every field the config gains.
        """
        c = self.config
        conventions = (c.num_drafts, c.target_layer_ids, c.mask_token_id, c.sample_from_anchor, c.block_attention)
        vocabulary = None if self.token_ids is None else self.token_ids.tolist()
        return parameters_digest(self.named_parameters(), repr((conventions, vocabulary)))

    # ---- serving

    @abstractmethod
    def new_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Storage for what the drafter keeps of the context; block tables are the target's."""

    @abstractmethod
    def inject(self, features: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor, cache: PagedKVCache) -> None:
        """Write committed rows' context: features [N, m, H]; positions, slots and the tokens that follow each row [N].

        The rows of one request stand together, in ascending order.
        """

    @abstractmethod
    def draft_rows(self, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Where the rows of one round's drafts stand and where what each sees ends: i64 [B] -> i64 [B, Q] twice.

        A request's context is [0, seq_len); every row of it is real.
        """

    def draft_batch(self, seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> AttentionBatch:
        """The forward of one round's drafts, laid out."""
        positions, visible_end = self.draft_rows(torch.tensor(seq_lens, device=self.device))
        counts = [positions.shape[1]] * len(seq_lens)
        return AttentionBatch.build(positions, counts, block_tables, block_size, visible_end)

    @abstractmethod
    def propose(
        self,
        anchors: Tensor,
        batch: AttentionBatch,
        cache: PagedKVCache,
        rows: SamplingRows | None,
        seq_lens: Tensor,
        num_drafts: int,
    ) -> DraftBlock:
        """Draft for each request: anchors [B] ids at positions seq_lens [B] -> tokens [B, num_drafts] and their law.

        `rows` None: every request is greedy, which is then not read back from the device.
        """

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Serving: final normed hidden states [..., H] -> fp32 logits [..., Vd]."""
        assert not isinstance(self._borrowed.head, nn.Identity), "call prepare() before drafting"
        logits: Tensor = self._borrowed.head(hidden)
        return softcap(logits.float(), self.config.final_logit_softcapping)

    def draw(self, logits: Tensor, rows: SamplingRows | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw the drafts at `positions` [B] from logits [B, Vd]: target ids [B], and their law [B, Vd].

        The law is None when every request is greedy, as without rows: nobody reads it then.
        """
        law = None
        if rows is None or bool(rows.greedy.all()):
            choice = argmax(logits)
        else:
            law = probabilities(logits[:, None], rows)[:, 0]
            # -1 marks a law that is not one (NaN): any token will do, since the verifier then draws from p alone.
            choice = categorical(law, uniform(rows.seed, positions, Role.DRAFT)).clamp_min(0)
        return (choice if self.token_ids is None else self.token_ids[choice]), law

    def block(
        self, tokens: list[Tensor], laws: list[Tensor | None], confidence_logits: Tensor | None = None
    ) -> DraftBlock:
        """Join the drawn drafts, each [B], and their laws, each [B, Vd]; confidence logits [B, G]."""
        known, device = [law for law in laws if law is not None], tokens[0].device
        return DraftBlock(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(known, dim=1) if known else torch.empty(len(tokens[0]), len(tokens), 0, device=device),
            token_ids=self.token_ids,
            confidence_logits=confidence_logits,
        )

    # ---- training

    @abstractmethod
    def train_hidden(
        self, token_ids: Tensor, features: Tensor, anchors: Tensor, valid: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Final normed hidden states of every draft slot of every anchor; slot k predicts the token at anchor + k + 1.

        token_ids [B, S]; features [B, S, m, H]; anchors [B, A] places in the row (never a conversation's first), valid
        [B, A] -> [B, A, G, H]. segment_ids [B, S]: the conversations of a row, each seen by its own anchors only and
        with positions of its own; None: one a row. Rows of an invalid anchor are finite and mean nothing.
        """


class _Borrowed:
    """The target's embedding table and LM head rows, held without registering them as the drafter's parameters."""

    def __init__(self, target: TargetEnds, token_ids: Tensor | None) -> None:
        self.embed = target.embed_tokens  # [...] -> [..., H], scaled where the target scales
        self.embedding = target.embed_tokens.weight.detach()
        full = target.lm_head_weight.detach()
        self.lm_head_weight = full if token_ids is None else full[token_ids]
        self.head: nn.Module = nn.Identity()


def check_target(config: DrafterConfig, target: TargetEnds, token_ids: Tensor | None) -> None:
    """Raise CheckpointError where the drafter's shape does not fit the target."""
    t = target.config
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, t.hidden_size),
        ("vocab_size", config.vocab_size, t.vocab_size),
        ("num_target_layers", config.num_target_layers, t.num_hidden_layers),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"drafter {name} is {ours} but the target has {theirs}: this drafter is for another target"
            )
    if (token_ids is None) != (config.draft_vocab_size is None):
        raise CheckpointError("draft_vocab_size and the d2t map must come together")
    if token_ids is not None and len(token_ids) != config.draft_vocab_size:
        raise CheckpointError(f"d2t has {len(token_ids)} entries but draft_vocab_size is {config.draft_vocab_size}")
