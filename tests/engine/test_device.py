"""Everything that the networks read is made on their device."""

import pytest
import torch

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import SamplingParams
from dspark.engine.runner import window_of


@pytest.mark.parametrize("kind", ["block", "chain", "full"])
def test_no_tensor_of_a_round_is_made_elsewhere(kind, target, make_drafter, make_chain):
    """The default device holds no data here: a tensor made there by mistake meets real ones and fails."""
    drafter = make_chain(target.decoder) if kind == "chain" else make_drafter(target.decoder)
    engine = Engine(target, drafter, EngineSettings(max_batch=2, max_length=80, block_size=4))
    for size in (5, 9):
        engine.submit(list(range(1, size)), SamplingParams(max_tokens=9, temperature=0.5))
    engine.step()
    requests, runner = list(engine._scheduler.running), engine._round.runner
    with torch.device("meta"), torch.inference_mode():
        window = window_of(requests, runner.device)
        block = runner.draft(window)
        lens = [5, 2]
        token_ids = torch.cat([window.anchors[:, None], block.tokens], 1)
        forward = runner.forward(window, token_ids, lens, capture=True, compact=kind != "full")
        logits = runner.logits(forward.states)
        runner.inject(forward, requests, [1, 1])
    assert logits.device == block.tokens.device == torch.device("cpu")
    assert len(logits) == sum(lens)
