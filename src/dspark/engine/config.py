"""Settings of the engine, and the options that name its two models. Imports no torch."""

from typing import Literal

from pydantic import Field

from dspark.config import Settings


class EngineSettings(Settings):
    """How much an engine serves at once, and how it speculates.

    The KV memory follows from `num_blocks`; by default every one of `max_batch` requests may grow to `max_length`.
    """

    max_batch: int = Field(8, ge=1)  # requests decoded together
    max_length: int = Field(2048, ge=2)  # tokens of prompt and answer together; the model's own limit holds as well
    block_size: int = Field(16, ge=1)  # tokens a cache block
    num_blocks: int | None = Field(None, ge=2)  # cache blocks, the reserved block 0 counted; None = see above
    prefill_tokens: int = Field(2048, ge=1)  # prompt rows of one prefill step, padding counted; one prompt always fits
    speculate: bool = True  # False: plain decoding even with a drafter
    num_draft_tokens: int | None = Field(
        None, ge=1
    )  # verify at most this many drafts a round; None = the drafter's own

    record_rounds: bool = False  # keep a RoundRecord of every speculative round, for evaluation and calibration

    def blocks_for(self, num_tokens: int) -> int:
        """Cache blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)


class ModelOptions(Settings):
    """Which target answers, and which drafter speeds it up."""

    target: str = "smollm2-135m"
    """A built-in name, a Hugging Face directory or hub id, or a GGUF file."""
    drafter: str = "auto"
    """A drafter directory; "auto" takes the one shipped for the target, "none" decodes plainly."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """"auto": as stored, but float32 where the processor does not compute in bfloat16."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; by default as many as there are cores."""
    num_draft_tokens: int | None = Field(None, ge=1)
    """Verify at most this many drafts a round; by default all."""
