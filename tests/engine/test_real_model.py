"""Real models in float32: speculation and plain decoding give the same greedy text, and transformers' logits."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.models.attention import AttentionBatch
from dspark.models.hub import home
from dspark.models.target import Target, load_target

NAME = "smollm2-135m"
QUESTIONS = [
    "Write a haiku about the sea.",
    "What is 17 times 23? Think step by step.",
    "Write a Python function that reverses a list.",
    "Name three uses of a paper clip.",
]
EVALUATION = Path(__file__).parents[3] / "shared" / "data" / "eval"


@pytest.fixture(scope="module")
def smollm() -> Target:
    if not (home() / "models" / NAME).is_dir():
        pytest.skip(f"{NAME} has not been fetched on this machine: run `dspark generate` once")
    return load_target(NAME, dtype="float32")


def chat(target: Target, question: str) -> list[int]:
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return target.tokenizer(text, add_special_tokens=False).input_ids


def same_text(target: Target, make_scripted, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Answer plainly and through blocks of drafts that are right three times in four; compare token for token."""
    settings = EngineSettings(max_batch=4, max_length=1024)
    params = SamplingParams(max_tokens=max_tokens)
    plain = Engine(target, None, settings).generate(prompts, params)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    engine = Engine(target, make_scripted(target.decoder, answers, wrong_every=4), settings)
    spec = engine.generate(prompts, params)
    assert [c.token_ids for c in spec] == [c.token_ids for c in plain]
    assert [c.text for c in spec] == [c.text for c in plain]
    for c in plain:  # an answer cut inside a character ends before it
        assert c.text == target.tokenizer.decode(c.token_ids, skip_special_tokens=True).rstrip("\ufffd")
    assert engine.stats.accepted_length > 2
    return [c.token_ids for c in plain]


def test_four_prompts(smollm, make_scripted):
    same_text(smollm, make_scripted, [chat(smollm, question) for question in QUESTIONS], 32)


def test_a_schema_penalties_and_log_probabilities(smollm, make_scripted):
    """A real vocabulary and a real grammar: greedy text is that of plain decoding, and it parses."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=40, json_schema=schema, repetition_penalty=1.1, logprobs=1)
    prompts = [chat(smollm, "Describe a person as JSON with name and age."), chat(smollm, "Who wrote Hamlet?")]
    plain = Engine(smollm, None, EngineSettings(max_batch=2, max_length=256)).generate(prompts, params)
    answers = {tuple(c.prompt_ids): c.token_ids for c in plain}
    engine = Engine(smollm, make_scripted(smollm.decoder, answers, wrong_every=4), EngineSettings(max_length=256))
    for completion, expected in zip(engine.generate(prompts, params), plain, strict=True):
        assert completion.token_ids == expected.token_ids
        assert json.loads(completion.text).keys() == {"name", "age"}
        for ours, theirs in zip(completion.logprobs, expected.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    assert engine.stats.accepted_length > 1.5


@pytest.mark.slow
def test_sixty_four_prompts_and_transformers(smollm, make_scripted):
    if not EVALUATION.is_dir():
        pytest.skip("the evaluation prompts are not here")
    questions = []
    for name in ("gsm8k", "humaneval", "mbpp", "arena-hard-v2"):
        rows = map(json.loads, (EVALUATION / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:16])
        questions += [row["turns"][0] for row in rows]
    prompts = [chat(smollm, question)[:400] for question in questions]
    answers = same_text(smollm, make_scripted, prompts, 64)
    assert len(answers) == 64

    reference = AutoModelForCausalLM.from_pretrained(home() / "models" / NAME, dtype=torch.float32).eval()
    for prompt, answer in list(zip(prompts, answers, strict=True))[::8]:
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert out[0, len(prompt) :].tolist() == answer


@pytest.mark.slow
def test_gemma3_file():
    """A GGUF file of Gemma 3 270M (or its chat model) answers, with the logits that transformers reads from it."""
    path = Path(os.environ.get("DSPARK_GEMMA3_GGUF", ""))
    if not path.is_file():
        pytest.skip("DSPARK_GEMMA3_GGUF names no file: point it to a GGUF of Gemma 3 270M")
    target = load_target(path, dtype="float32", pack=False)
    assert target.config.layer_types.count("full_attention") == 3
    question = "What is the capital of France? The capital of France is"
    asked = target.tokenizer.chat_template is not None  # the base model has no template: it continues the text
    prompt = chat(target, question) if asked else target.tokenizer(question).input_ids
    assert prompt[0] == target.tokenizer.bos_token_id
    (completion,) = Engine(target).generate([prompt], SamplingParams(max_tokens=8))
    assert "Paris" in completion.text

    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = torch.randint(10, 200_000, (1, 540), generator=torch.Generator().manual_seed(1))  # beyond the window of 512
    batch = AttentionBatch.build(torch.arange(540)[None], [540], [list(range(1, 35))], 16)
    with torch.inference_mode():
        ours = target.decoder(ids, batch, target.decoder.new_cache(35, 16)).hidden
        theirs = reference.model(ids).last_hidden_state
        for rows in torch.arange(540).split(108):  # a row of logits is a megabyte
            wanted = reference.lm_head(theirs[:, rows])
            assert (target.decoder.logits(ours[:, rows]) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert out[0, len(prompt) :].tolist() == completion.token_ids
