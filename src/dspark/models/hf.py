"""Any transformers causal LM as a source of hidden states: for capture and training, where our decoder lacks a family.

Shapes: B rows, T tokens of the longest, S tokens of one row, m taps, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark.errors import CheckpointError
from dspark.models.hub import resolve_model

MIN_AGREEMENT = 0.98  # share of tokens whose argmax must be the model's own


class RowStates(NamedTuple):
    """The states of one row, in the model's dtype and on its device."""

    taps: Tensor  # [S, m, H], the residual stream after each tapped layer, in the order asked for
    last_hidden: Tensor  # [S, H], the residual stream before the final norm


class HuggingFaceCausalLM:
    """A transformers model that gives what `Decoder` gives: tapped layers, and what its norm and head make logits of.

    Layers, final norm and head are found by structure: the list of as many modules as the config counts layers, the
    norm beside it, and the output embeddings. Whether those are right is checked on the first rows: the argmax from
    the stored last hidden state must be the model's own.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Wrap a loaded model; `name` stands in errors. Raises `CheckpointError` when its structure is another."""
        self.name = name
        self._model: Any = model.requires_grad_(False).eval()  # type: ignore[no-untyped-call]
        self._backbone, self._layers = _layers_of(model, name)
        self._norm = _norm_of(self._backbone, self._layers, name)
        self._head = _head_of(model, name)
        self._checked = False

    @classmethod
    def load(
        cls, name_or_path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
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
        return cls(model.to(device), str(name_or_path))

    @property
    def num_layers(self) -> int:
        """How many layers there are to tap."""
        return len(self._layers)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return int(self._model.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and states."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._model.device
        return device

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        norm: nn.Module = self._norm
        return norm

    @property
    def lm_head_weight(self) -> Tensor:
        """The rows [V, H] that turn normed states into logits."""
        weight = self._head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def final_logit_softcapping(self) -> float | None:
        """The soft cap of the logits, as Gemma's configs name it."""
        cap: float | None = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        return cap

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> list[RowStates]:
        """Run rows of token ids, of unequal lengths (at least 1), together; return their states in their order.

        A tap is a layer id: i is the output of layer i, -1 what enters layer 0. Raises `CheckpointError` for a layer
        that is not there and, at the first call, when the stored states do not give back the model's choices.
        """
        if bad := [i for i in taps if not -1 <= i < self.num_layers]:
            raise CheckpointError(f"{self.name}: there is no layer {bad[0]}: taps are in -1..{self.num_layers - 1}")
        if not self._checked:
            self.check(rows)
            self._checked = True
        found, _ = self._run(rows, taps, with_logits=False)
        return found

    def logits(self, last_hidden: Tensor) -> Tensor:
        """Final norm and LM head alone: states [..., H] -> [..., V], without what a model does to its logits later."""
        logits: Tensor = self._head(self._norm(last_hidden.to(self.device, self.dtype)))
        return logits

    @torch.inference_mode()
    def check(self, rows: Sequence[Sequence[int]]) -> float:
        """Return the share of tokens of `rows` whose argmax from the stored last hidden state is the model's own.

        Raises `CheckpointError` naming the model when that is below `MIN_AGREEMENT`.
        """
        found, logits = self._run(rows, (), with_logits=True)
        agreed = total = 0
        for row, states in zip(logits, found, strict=True):
            length = len(states.last_hidden)
            agreed += int((self.logits(states.last_hidden).argmax(-1) == row[:length].argmax(-1)).sum())
            total += length
        if agreed < MIN_AGREEMENT * total:
            raise CheckpointError(
                f"{self.name}: final norm and LM head give the model's own choice at {agreed} of {total} tokens only: "
                f"{type(self._model).__name__} does something else with its last hidden state and cannot be captured"
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
            output = self._model(**inputs) if with_logits else self._model.base_model(**inputs)
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
    return head
