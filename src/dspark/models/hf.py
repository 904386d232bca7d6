"""Any transformers causal LM as a source of hidden states: for capture and training, where our decoder lacks a family.

Shapes: B rows, T tokens of the longest, S tokens of one row, N states, m taps, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark.errors import CheckpointError
from dspark.models.config import DecoderConfig
from dspark.models.hf_config import describe, logit_scale
from dspark.models.hub import resolve_model
from dspark.models.layers import softcap
from dspark.models.states import RowStates

MIN_AGREEMENT = 0.98  # share of tokens whose argmax must be the model's own
MAX_LOGIT_ERROR = 0.02  # relative error of the logits: bfloat16 stays far below
_CHECKED_ROWS, _CHECKED_TOKENS = 4, 128  # of the first batch: logits over a whole vocabulary are large


class HuggingFaceCausalLM:
    """A transformers model that gives what `Decoder` gives: tapped layers, and what its norm and head make logits of.

    Layers, final norm and head are found by structure: the list of as many modules as the config counts layers, the
    norm beside it, and the output embeddings. Whether those are right is checked on the first rows: the logits from
    the stored last hidden state must be the model's own.
    """

    def __init__(self, model: PreTrainedModel, name: str, config: DecoderConfig | None = None) -> None:
        """Wrap a loaded model; `name` stands in errors, `config` is what our decoder makes of its own, if it knows it.

        Raises `CheckpointError` when its structure is another.
        """
        self.name = name
        self._known = config
        self.model: Any = model.requires_grad_(False).eval()  # type: ignore[no-untyped-call]
        self._backbone, self._layers = _layers_of(model, name)
        self._norm = _norm_of(self._backbone, self._layers, name)
        self.head = _head_of(model, name)
        self._checked = False

    @classmethod
    def load(
        cls, name_or_path: str | Path, dtype: torch.dtype | None = None, config: DecoderConfig | None = None
    ) -> Self:
        """Load a Hugging Face directory, hub id or GGUF file; `dtype` None keeps the stored one.

        Raises `CheckpointError`.
        """
        path = resolve_model(name_or_path)
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype or "auto", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{name_or_path}: transformers cannot load it ({error})") from None
        return cls(model, str(name_or_path), config)

    @property
    def num_layers(self) -> int:
        """How many layers there are to tap."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        norm: nn.Module = self._norm
        return norm

    @cached_property
    def config(self) -> DecoderConfig:
        """What drafters and caches need of its config. Raises `CheckpointError` for sizes no drafter can have."""
        if self._known is not None:
            return self._known
        rows, vocab_size = self.embed_tokens.num_embeddings, len(self.head.get_parameter("weight"))
        if rows != vocab_size:
            raise CheckpointError(f"{self.name}: has {rows} embeddings but {vocab_size} logits: they must be as many")
        return describe(self.model.config, vocab_size, self.name)

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The embedding table. Raises `CheckpointError` where the model has another kind."""
        embedding = self.model.get_input_embeddings()
        if not isinstance(embedding, nn.Embedding):
            raise CheckpointError(f"{self.name}: its input embeddings are a {type(embedding).__name__}, not a table")
        return embedding

    @cached_property
    def lm_head_weight(self) -> Tensor:
        """The rows [V, H] that turn normed states into logits, scaled as the model scales those."""
        weight, scale = self.head.get_parameter("weight"), logit_scale(self.model.config)
        with torch.inference_mode(False), torch.no_grad():  # a drafter may be trained with it
            return weight if scale == 1.0 else weight * scale

    @property
    def final_logit_softcapping(self) -> float | None:
        """The soft cap of the logits, as Gemma's configs name it."""
        return self.config.final_logit_softcapping

    def to(self, device: torch.device | str) -> Self:
        """Move the model, in place."""
        self.model.to(device)
        vars(self).pop("lm_head_weight", None)
        return self

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Every parameter under its name in transformers, a shared one once."""
        return list(self.model.named_parameters())

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> list[RowStates]:
        """Run rows of token ids, of unequal lengths (at least 1), together; return their states in their order.

        A tap is a layer id: i is the output of layer i, -1 what enters layer 0. Raises `CheckpointError` for a layer
        that is not there and, at the first call, when the stored states do not give back the model's choices.
        """
        if bad := [i for i in taps if not -1 <= i < self.num_layers]:
            raise CheckpointError(f"{self.name}: there is no layer {bad[0]}: taps are in -1..{self.num_layers - 1}")
        if not self._checked:
            self.check([row[:_CHECKED_TOKENS] for row in rows[:_CHECKED_ROWS]])
            self._checked = True
        found, _ = self._run(rows, taps, with_logits=False)
        return found

    def logits(self, last_hidden: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H] before the final norm, by norm, LM head and soft cap alone."""
        normed = self._norm(last_hidden.to(self.device, self.dtype))
        return softcap(F.linear(normed, self.lm_head_weight), self.final_logit_softcapping)

    @torch.inference_mode()
    def check(self, rows: Sequence[Sequence[int]]) -> float:
        """Return the share of tokens of `rows` whose argmax from the stored last hidden state is the model's own.

        Raises `CheckpointError` naming the model when that is below `MIN_AGREEMENT`, or when the logits are others.
        """
        found, logits = self._run(rows, (), with_logits=True)
        own = torch.cat([row[: len(states.last_hidden)] for row, states in zip(logits, found, strict=True)]).float()
        ours = torch.cat([self.logits(states.last_hidden) for states in found]).float()
        agreed, total = int((ours.argmax(-1) == own.argmax(-1)).sum()), len(own)
        kind = type(self.model).__name__
        if agreed < MIN_AGREEMENT * total:
            raise CheckpointError(
                f"{self.name}: final norm and LM head give the model's own choice at {agreed} of {total} tokens only: "
                f"{kind} does something else with its last hidden state and cannot be captured"
            )
        error = float((ours - own).norm() / own.norm())
        if not error <= MAX_LOGIT_ERROR:  # not a number, where some logits are infinite
            raise CheckpointError(
                f"{self.name}: {kind} changes the logits of its LM head (relative error {error:.2f}) in a way that is "
                "not known here: a drafter would be trained for another law"
            )
        return agreed / total

    def _run(
        self, rows: Sequence[Sequence[int]], taps: tuple[int, ...], with_logits: bool
    ) -> tuple[list[RowStates], Tensor]:
        """Run right-padded rows with hooks; the logits [B, T, V] are empty unless asked for."""
        lengths = [len(row) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = torch.tensor(row)
            mask[b, : len(row)] = 1
        recorder = _Recorder(self._layers, self._norm, taps)
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device), "use_cache": False}
        with recorder:
            output = self.model(**inputs) if with_logits else self.model.base_model(**inputs)
        last = recorder.states["last"]
        found = []
        for b, length in enumerate(lengths):
            tapped = [recorder.states[tap][b, :length] for tap in taps]
            empty = last.new_empty(length, 0, last.shape[-1])
            found.append(RowStates(torch.stack(tapped, dim=1) if tapped else empty, last[b, :length]))
        return found, output.logits if with_logits else last.new_empty(len(rows), 0, 0)


class _Recorder:
    """Keeps what passes the tapped layers and enters the final norm while it is active."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, taps: tuple[int, ...]) -> None:
        self.states: dict[int | str, Tensor] = {}
        self._layers, self._norm, self._taps = layers, norm, taps
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for tap in set(self._taps):
            if tap == -1:
                self._hooks.append(self._layers[0].register_forward_pre_hook(self._entering(-1), with_kwargs=True))
            else:
                self._hooks.append(self._layers[tap].register_forward_hook(self._leaving(tap)))
        self._hooks.append(self._norm.register_forward_pre_hook(self._entering("last"), with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, key: int | str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            self.states[key] = state.clone()  # a model may go on to change it in place

        return hook

    def _leaving(self, key: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self.states[key] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook


def _layers_of(model: PreTrainedModel, name: str) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that holds the decoder layers, and their list."""
    count = model.config.get_text_config().num_hidden_layers
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    for parent in decoder.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    raise CheckpointError(f"{name}: {type(model).__name__} has no list of {count} decoder layers to tap")


def _norm_of(backbone: nn.Module, layers: nn.ModuleList, name: str) -> nn.Module:
    """Return the one norm beside the layers, or the one registered after them where embeddings have another."""
    children = list(backbone.children())
    first = next(i for i, child in enumerate(children) if child is layers) + 1
    beside, after = ([c for c in group if "norm" in type(c).__name__.lower()] for group in (children, children[first:]))
    norms = beside if len(beside) == 1 else after
    if len(norms) != 1:
        raise CheckpointError(
            f"{name}: {type(backbone).__name__} has {len(norms)} norms after its layers, not one before the LM head: "
            "it cannot be captured"
        )
    return norms[0]


def _head_of(model: PreTrainedModel, name: str) -> nn.Module:
    """Return the module that makes logits of normed states."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise CheckpointError(f"{name}: {type(model).__name__} has no LM head; give a causal language model")
    if head.get_parameter("weight").shape[1] != model.config.get_text_config().hidden_size:
        raise CheckpointError(f"{name}: the LM head of {type(model).__name__} does not read the final norm directly")
    refuse_biases(head, name)
    return head


def refuse_biases(head: nn.Module, name: str) -> None:
    """Raise `CheckpointError` for an LM head with biases: drafters and their losses know the rows alone."""
    bias = getattr(head, "bias", None)
    if isinstance(bias, Tensor) and not bias.is_meta and bool(bias.any()):
        raise CheckpointError(f"{name}: its LM head adds biases to the logits, which no drafter takes over")
