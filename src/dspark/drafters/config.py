"""The settings that fix a drafter's network. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dspark.config import Settings
from dspark.models.config import RopeConfig

Algorithm = Literal["dspark", "dflash", "eagle3"]


class DrafterConfig(Settings):
    """Shape and conventions of a drafter (DSpark paper section 3; DFlash is the same without heads; EAGLE-3).

    Field names follow the public DeepSpec checkpoints. `target_layer_ids` count decoder layers from 0; id i reads the
    output of layer i and -1 the embedding output. `block_size`, `mask_token_id`, the slot and attention conventions and
    the heads are those of block drafters; the last three fields are EAGLE-3's.
    """

    algorithm: Algorithm = "dspark"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    rope: RopeConfig
    max_position_embeddings: int
    qk_norm: bool = True
    attention_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int = 7
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    block_attention: Literal["bidirectional", "causal"] = "bidirectional"
    markov_rank: int = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None
    layer_style: Literal["qwen3", "gemma4"] = "qwen3"
    """`gemma4`, of the public drafters for such a target: norms also on what attention, values and MLP give, scores
    that are not divided, and a stored number that each layer's output is multiplied by."""
    attention_k_eq_v: bool = False
    """The values are the projected keys (gemma4 layers only)."""
    final_logit_softcapping: float | None = None
    """The LM head's logits x become cap * tanh(x / cap), before the sequential head adds to them."""
    ttt_length: int = Field(7, ge=1)
    """Steps of training-time test, and so drafts of a chain."""
    step_loss_decay: float = Field(0.8, gt=0, le=1)
    """Step k of training-time test weighs step_loss_decay ** k."""
    own_lm_head: bool = False
    """Whether the LM head is trained with the drafter; else it is the target's."""

    @property
    def num_drafts(self) -> int:
        """Draft tokens per round, gamma."""
        if self.algorithm == "eagle3":
            return self.ttt_length
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def query_rows(self) -> int:
        """Rows fed per round: the anchor and the masks, `block_size` in both slot conventions; or those of a chain."""
        return self.ttt_length if self.algorithm == "eagle3" else self.block_size

    @property
    def attention_width(self) -> int:
        """Width of what the query, key and value projections read: EAGLE-3's read [embedding ; hidden]."""
        return 2 * self.hidden_size if self.algorithm == "eagle3" else self.hidden_size

    @property
    def num_draft_logits(self) -> int:
        """Width of the draft distribution: the reduced draft vocabulary where there is one."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return 1.0 if self.layer_style == "gemma4" else float(self.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """The attention window of one draft layer in tokens, or None for full attention."""
        kinds = self.layer_types
        return self.sliding_window if kinds and kinds[layer] == "sliding_attention" else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        bad = [i for i in self.target_layer_ids if not -1 <= i < self.num_target_layers - 1]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} must be in -1..{self.num_target_layers - 2}: "
                "ids count decoder layers from 0 and the last layer's output is not allowed"
            )
        if self.num_drafts < 1:
            raise ValueError("block_size leaves no draft token: raise it")
        if self.algorithm == "eagle3":
            self._check_chain()
        elif self.mask_token_id is None:
            raise ValueError("mask_token_id is missing: name a token that the target never writes")
        elif not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        elif self.own_lm_head:
            raise ValueError(f"own_lm_head is for eagle3: algorithm {self.algorithm} uses the target's LM head")
        if self.confidence_head_with_markov and not (self.enable_confidence_head and self.markov_rank):
            raise ValueError("confidence_head_with_markov needs enable_confidence_head and markov_rank > 0")
        if self.algorithm == "dflash" and (self.markov_rank or self.enable_confidence_head):
            raise ValueError("algorithm dflash has neither markov_rank nor a confidence head: use dspark")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types must name every draft layer")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types has sliding_attention: set sliding_window")
        if self.layer_style == "gemma4" and not self.qk_norm:
            raise ValueError("layer_style gemma4 has qk_norm")
        if self.attention_k_eq_v and self.layer_style != "gemma4":
            raise ValueError("attention_k_eq_v needs layer_style gemma4")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must be in 1..{self.vocab_size}")
        return self

    def _check_chain(self) -> None:
        if self.num_hidden_layers != 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}: algorithm eagle3 has one layer")
        if self.markov_rank or self.enable_confidence_head:
            raise ValueError("algorithm eagle3 has neither markov_rank nor a confidence head: use dspark")
        if self.window(0) is not None:
            raise ValueError("algorithm eagle3 sees the whole context: layer_types must be full_attention")
