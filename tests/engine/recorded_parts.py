"""Parts that tests of recorded rounds share: drafters that know the answers, and requests that come and go."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.drafters.dspark import BlockDrafter
from dspark.drafters.eagle3 import Eagle3Cache, Eagle3Drafter
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams
from dspark.spec.types import DraftBlock

PROMPTS = [[(7 * i * i + 13 * n) % 255 + 1 for i in range(n)] for n in (1, 5, 12, 3, 20, 31, 8, 2, 17)]
PROMPTS.append(PROMPTS[5] + [9, 9])  # begins as another one does
SETTINGS = EngineSettings(max_batch=3, max_length=90, block_size=8, step_tokens=24)


class Knowing(Drafter):
    """A real drafter whose greedy drafts are read from a table [positions, V, G], as a recording can."""

    table: Tensor

    def propose(self, anchors, batch, cache, rows, seq_lens, num_drafts) -> DraftBlock:
        block = super().propose(anchors, batch, cache, rows, seq_lens, num_drafts)
        known = self.table[seq_lens, anchors][:, :num_drafts]
        return block._replace(tokens=known if rows is None else torch.where(rows.greedy[:, None], known, block.tokens))


class KnowingBlock(Knowing, BlockDrafter):
    """DSpark or DFlash."""


class KnowingChain(Knowing, Eagle3Drafter):
    """EAGLE-3."""


def table_of(script: Callable[[int, int], list[int]], num_positions: int, vocab_size: int, num_drafts: int) -> Tensor:
    """A script of drafts as a table."""
    rows = [[script(p, token)[:num_drafts] for token in range(vocab_size)] for p in range(num_positions)]
    return torch.tensor(rows)


def params_of(prompts: Sequence[Sequence[int]]) -> list[SamplingParams]:
    """Greedy, with ends of many kinds."""
    return [
        SamplingParams(
            max_tokens=(7, 24, 13, 1, 30, 18)[i % 6], ignore_eos=i % 3 > 0, stop=("q",) if i % 4 == 2 else ()
        )
        for i, _ in enumerate(prompts)
    ]


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], beside: Engine | None = None
) -> dict[str, Completion]:
    """Answer requests of which one more comes every other step, with the engine checked after each.

    `beside` is an engine that runs eagerly: it serves the same, and the drafter's context is compared after each step.
    """
    waiting = [(str(i), *request) for i, request in enumerate(zip(prompts, params, strict=True))]
    done: dict[str, Completion] = {}
    step = 0
    while waiting or engine.has_work():
        if waiting and step % 2 == 0:
            name, prompt, param = waiting.pop(0)
            engine.submit(prompt, param, name)
            if beside is not None:
                beside.submit(prompt, param, name)
        for out in engine.step():
            if out.completion is not None:
                done[f"{out.request_id}.{out.index}"] = out.completion
        engine.check_integrity()
        check_block_zero(engine)
        if beside is not None:
            beside.step()
            check_context(engine, beside)
        step += 1
    return done


def check_block_zero(engine: Engine) -> None:
    """Block 0 stands where tables have no block, so nobody may ever write there."""
    runner = engine._round.runner
    caches = [runner.cache] + ([runner.draft_cache] if runner.drafter else [])
    for cache in caches:
        for stored in (*cache.k, *cache.v):
            assert not stored[: cache.block_size].any()


def check_context(engine: Engine, beside: Engine) -> None:
    """The drafter's cache holds the same of every running request, as far as it is valid."""
    size = engine.settings.block_size
    ours, theirs = engine._round.runner.draft_cache, beside._round.runner.draft_cache
    for mine, other in zip(engine._scheduler.running, beside._scheduler.running, strict=True):
        assert (mine.request_id, mine.context_len) == (other.request_id, other.context_len)
        slots, others = (
            [r.block_table[p // size] * size + p % size for p in range(r.context_len)] for r in (mine, other)
        )
        for a, b in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
            torch.testing.assert_close(a[slots], b[others], rtol=1e-4, atol=1e-5)
        if isinstance(ours, Eagle3Cache) and slots:
            a, b = (cache.state(torch.tensor(some[-1:])) for cache, some in ((ours, slots), (theirs, others)))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def texts(done: dict[str, Completion]) -> dict[str, tuple[list[int], str, str]]:
    """What was written."""
    return {name: (c.token_ids, c.text, c.finish_reason) for name, c in done.items()}
