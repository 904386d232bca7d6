"""Round records: what evaluation and calibration read of each speculative round."""

from itertools import accumulate

import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams

PROMPTS = [[(11 * i * n) % 250 + 1 for i in range(n)] for n in (3, 9, 14)]
ENDLESS = SamplingParams(max_tokens=20, ignore_eos=True)


def test_records_agree_with_the_answer(target, make_scripted):
    plain = Engine(target).generate(PROMPTS, ENDLESS)
    drafter = make_scripted(target.decoder, {tuple(c.prompt_ids): c.token_ids for c in plain}, wrong_every=4)
    done = Engine(target, drafter, EngineSettings(record_rounds=True)).generate(PROMPTS, ENDLESS)
    for completion in done:
        records = completion.round_records
        assert len(records) == completion.rounds
        outputs = [1, *(record.num_output for record in records)]  # the first token comes from the prefill
        assert sum(outputs) == len(completion.token_ids)
        starts = [len(completion.prompt_ids) + told - 1 for told in accumulate(outputs)]
        assert [record.position for record in records] == starts[:-1]
        assert all(record.num_output == record.correct_len + 1 for record in records[:-1])
        assert sum(record.verify_len - 1 for record in records) == completion.drafted
        assert {record.confidence_logits for record in records} == {()}, "this drafter has no confidence head"
        assert not records[-1].is_full_width or records[-1].position + 5 <= len(completion.prompt_ids) + 20
        assert all(record.num_drafts for record in records[:-1]), "only a last token alone goes without drafts"
    assert any(record.is_full_width for record in done[0].round_records)


def test_recorded_confidence_is_the_heads(target, make_drafter):
    drafter = make_drafter(target.decoder, enable_confidence_head=True)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(1.5)
    (done,) = Engine(target, drafter, EngineSettings(record_rounds=True)).generate(PROMPTS[:1], ENDLESS)
    assert {len(record.confidence_logits) for record in done.round_records if record.num_drafts} == {drafter.num_drafts}
    assert {logit for record in done.round_records for logit in record.confidence_logits} == {1.5}


def test_nothing_is_kept_unless_asked_for(target, make_drafter):
    (done,) = Engine(target, make_drafter(target.decoder)).generate(PROMPTS[:1], ENDLESS)
    assert done.rounds
    assert not done.round_records
