"""GGUF files: the same model as the one they were written from, and as transformers reads from them."""

from pathlib import Path

import pytest
import torch
import transformers

from dspark.errors import CheckpointError
from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder
from dspark.models.gguf import GgufFile
from dspark.models.hub import BUILTINS, fetch_gguf
from dspark.models.tokenizer import load_tokenizer
from dspark.models.weights import load_decoder

from .conftest import make_reference
from .test_parity import close
from .tiny_gguf import write_gguf


def logits_of(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    batch = AttentionBatch.build(torch.arange(length)[None], [length], [list(range(1, 5))], 8)
    with torch.inference_mode():
        return decoder.logits(decoder(ids, batch, decoder.new_cache(5, 8)).hidden)


@pytest.mark.parametrize("name", ["llama_tied", "llama", "mistral_sliding", "qwen2", "qwen3", "gemma3_pattern"])
def test_same_logits_as_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    model = make_reference(name)
    decoder = load_decoder(write_gguf(model, tmp_path / "tiny.gguf"), torch.float32)
    assert decoder.config.eos_token_ids == (2,)
    ids = torch.randint(3, 101, (1, 27), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert close(logits_of(decoder, ids), model(ids).logits)


def test_quantised_tensors(tmp_path: Path) -> None:
    model = make_reference("llama_tied")
    exact = load_decoder(write_gguf(model, tmp_path / "a.gguf"), torch.float32)
    rounded = load_decoder(write_gguf(model, tmp_path / "b.gguf", quantise=True), torch.float32)
    weight, stored = exact.layers[0].self_attn.o_proj.weight, rounded.layers[0].self_attn.o_proj.weight
    assert 0 < (weight - stored).abs().max() < 0.01 * weight.abs().max()


def test_tokenizer_of_a_file(tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama_tied"), tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab!</s>")) == ["ab", "!", "</s>"]
    assert "messages" in str(tokenizer.chat_template)


def test_broken_files(tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama_tied"), tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for damage in (whole[:-50], whole[: len(whole) // 2], whole[:3000], whole[:10], b"", b"GGUF" + b"\xff" * 100):
        path.write_bytes(damage)
        with pytest.raises(CheckpointError, match="damaged or truncated GGUF file") as caught:
            load_decoder(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="missing"):
        load_decoder(tmp_path / "none.gguf")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama_tied"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(CheckpointError, match=r"\(gemma\); supported, dense: llama, qwen2, qwen3, gemma3"):
        GgufFile(path)


@pytest.mark.slow
def test_real_file_as_transformers_reads_it(tmp_path: Path) -> None:
    """SmolLM2's own GGUF file, quantised to four bits: the same float32 logits from both readers."""
    try:
        path = fetch_gguf("smollm2-135m", BUILTINS["smollm2-135m"], tmp_path)
    except CheckpointError as error:
        pytest.skip(str(error))
    decoder = load_decoder(path, torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.randint(3, 40_000, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert close(logits_of(decoder, ids), model.eval()(ids).logits)
