"""Hidden states of any transformers causal LM: our decoder's where it knows the family, transformers' own elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.attention import AttentionBatch
from dspark.models.hf import HuggingFaceCausalLM
from dspark.models.weights import load_decoder

from .conftest import make_reference
from .test_parity import close
from .test_weights import Save

SMALL: dict[str, Any] = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "phi": ("Phi", WIDTHS | {"max_position_embeddings": 64}),
    "gpt_neox": ("GPTNeoX", WIDTHS | {"max_position_embeddings": 64}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),  # another norm before the layers
    "opt": ("OPT", WIDTHS | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
}
ROWS = [[5, 9, 3], list(range(3, 20)), [7] * 8 + [11]]


def random_model(name: str, **changes: Any) -> transformers.PreTrainedModel:
    family, fields = OTHERS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SMALL | fields | changes)
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, family + kind)(config).eval()


def alone(model: transformers.PreTrainedModel, row: list[int]) -> tuple[Tensor, ...]:
    """transformers' own states of one row: after the embeddings and after each layer but the last, [S, H] each."""
    with torch.inference_mode():
        output = model(torch.tensor([row]), output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in output.hidden_states[:-1])


def test_the_states_of_our_decoder(save_reference: Save) -> None:
    model, path = save_reference("llama")
    source, decoder, taps = HuggingFaceCausalLM(model, "llama"), load_decoder(path), (2, -1, 0, 3)
    assert (source.num_layers, source.hidden_size, source.dtype) == (4, 48, torch.float32)
    for row, states in zip(ROWS, source(ROWS, taps), strict=True):
        cache = decoder.new_cache(4, 8)
        batch = AttentionBatch.build(torch.arange(len(row))[None], [len(row)], [[1, 2, 3]], 8)
        with torch.inference_mode():
            output = decoder(torch.tensor([row]), batch, cache, taps)
        assert close(states.taps, output.taps[0])
        assert close(states.last_hidden, output.hidden[0])
        assert close(source.logits(states.last_hidden), decoder.logits(output.hidden)[0])


@pytest.mark.parametrize("name", OTHERS)
def test_families_that_our_decoder_does_not_know(name: str) -> None:
    model = random_model(name)
    source = HuggingFaceCausalLM(model, name)
    assert source.check(ROWS) == 1.0
    for row, states in zip(ROWS, source(ROWS, (-1, 0, 1)), strict=True):
        wanted = alone(model, row)
        for tap in range(3):
            assert close(states.taps[:, tap], wanted[tap]), tap
        with torch.inference_mode():
            assert close(source.logits(states.last_hidden), model(torch.tensor([row])).logits[0])


def test_bfloat16_and_no_taps() -> None:
    model = random_model("phi").bfloat16()
    states = HuggingFaceCausalLM(model, "phi")(ROWS)
    assert [tuple(s.taps.shape) for s in states] == [(3, 0, 32), (17, 0, 32), (9, 0, 32)]
    assert {s.last_hidden.dtype for s in states} == {torch.bfloat16}


def test_from_a_directory(tmp_path: Path) -> None:
    model = random_model("gpt2")
    model.save_pretrained(tmp_path)
    (states,) = HuggingFaceCausalLM.load(tmp_path)([ROWS[1]], (1,))
    (wanted,) = HuggingFaceCausalLM(model, "same")([ROWS[1]], (1,))
    assert torch.equal(states.taps, wanted.taps)
    assert HuggingFaceCausalLM.load(tmp_path, torch.bfloat16).dtype == torch.bfloat16
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="transformers cannot load it") as caught:
        HuggingFaceCausalLM.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_structures_without_norm_or_head() -> None:
    first = transformers.OpenAIGPTConfig(vocab_size=60, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(CheckpointError, match="gpt-1: OpenAIGPTModel has 0 norms after its layers"):
        HuggingFaceCausalLM(transformers.OpenAIGPTLMHeadModel(first), "gpt-1")
    with pytest.raises(CheckpointError, match="bare: LlamaModel has no LM head"):
        HuggingFaceCausalLM(make_reference("llama").model, "bare")
    with pytest.raises(CheckpointError, match="opt-350m: the LM head of OPTForCausalLM does not read the final norm"):
        HuggingFaceCausalLM(random_model("opt", word_embed_proj_dim=16), "opt-350m")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),
    ],
)
def test_logits_that_a_model_scales_or_caps(family: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SMALL | WIDTHS | {"initializer_range": 0.3} | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    source = HuggingFaceCausalLM(model, family)
    (states,) = source([ROWS[1]])
    with torch.inference_mode():
        assert close(source.logits(states.last_hidden), model(torch.tensor([ROWS[1]])).logits[0])
    assert not source.lm_head_weight.is_inference(), "a drafter is trained with it"


def test_heads_that_no_drafter_takes_over() -> None:
    model = random_model("phi")
    torch.nn.init.normal_(model.lm_head.bias)
    with pytest.raises(CheckpointError, match="phi: its LM head adds biases"):
        HuggingFaceCausalLM(model, "phi")
    source = HuggingFaceCausalLM(_LoudLlama(make_reference("llama").config), "loud")
    with pytest.raises(CheckpointError, match=r"loud: _LoudLlama changes the logits .* \(relative error 0\.50\)"):
        source(ROWS)


class _LoudLlama(transformers.LlamaForCausalLM):
    """A model whose choices are those of norm and head, and whose probabilities are others."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


class _ReversedLlama(transformers.LlamaForCausalLM):
    """A model that does something else with its last hidden state than norm and head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output


def test_a_capture_that_would_be_wrong_is_refused() -> None:
    source = HuggingFaceCausalLM(_ReversedLlama(make_reference("llama").config), "reversed")
    with pytest.raises(CheckpointError, match=r"reversed: .* at 0 of 29 tokens only: _ReversedLlama"):
        source(ROWS)
    with pytest.raises(CheckpointError, match=r"llama: there is no layer 4: taps are in -1\.\.3"):
        HuggingFaceCausalLM(make_reference("llama"), "llama")(ROWS, (4,))
