"""The built-in target as a whole, packed, against transformers on the same converted files."""

import pytest
import torch
import transformers

from dspark.errors import CheckpointError
from dspark.models.attention import AttentionBatch
from dspark.models.hub import resolve_model
from dspark.models.target import load_target

from .test_parity import close

BLOCK = 16


@pytest.mark.slow
def test_builtin_target_matches_transformers() -> None:
    try:
        path = resolve_model("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))
    target = load_target("smollm2-135m", dtype="float32")
    assert target.eos_token_ids == (target.tokenizer.eos_token_id,) == (2,)
    prompt = [{"role": "user", "content": "Name the capital of France."}]
    ids = target.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    cache = target.decoder.new_cache(8, BLOCK)
    with torch.inference_mode():
        wanted = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist()
        start, feed, answer = 0, ids, []
        while len(answer) < len(wanted):
            end = start + feed.shape[1]
            batch = AttentionBatch.build(torch.arange(start, end)[None], [end - start], [[3, 4, 5, 6, 7]], BLOCK)
            logits = target.decoder.logits(target.decoder(feed, batch, cache).hidden)
            assert start or close(logits, model(ids).logits)
            answer.append(int(logits[0, -1].argmax()))
            start, feed = end, torch.tensor([answer[-1:]])
    assert answer == wanted
    assert "Paris" in target.tokenizer.decode(answer)
