"""Settings of the engine, and the options that name its two models. Imports no torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

import tyro
from pydantic import Field, model_validator

from dspark.config import Settings

PlannerKind = Literal["static", "early_stop", "lagged"]
VerifyRows = Literal["compact", "full", "cap_accept"]


class EngineSettings(Settings):
    """How much an engine serves at once, and how it speculates.

    The KV memory follows from `num_blocks`; by default every one of `max_batch` requests may grow to `max_length`.
    A step runs one decode round for all running requests, and as many prompt rows, padding counted, as the round leaves
    of `step_tokens`, but at least a block: a long prompt is cut in chunks, so it holds nobody up.
    """

    max_batch: int = Field(8, ge=1)  # requests decoded together
    max_length: int = Field(2048, ge=2)  # tokens of prompt and answer together; the model's own limit holds as well
    block_size: int = Field(16, ge=1)  # tokens a cache block
    num_blocks: int | None = Field(None, ge=2)  # cache blocks, the reserved block 0 counted; None = see above
    step_tokens: int = Field(256, ge=1)  # rows of one step: first those of the decode round, the rest for prompts
    prefix_cache: bool = True  # keep the blocks of past tokens for prompts that begin alike
    max_waiting: int | None = Field(None, ge=0)  # requests that may wait for a place; one more is refused; None = any
    aging_steps: int = Field(1000, ge=0)  # what one level of priority is worth: a head start of so many steps
    speculate: bool = True  # False: plain decoding even with a drafter
    num_draft_tokens: int | None = Field(None, ge=1)  # verify at most this many a round; None = the drafter's own
    verification: Literal["token", "block"] = "token"  # block: judge sampled blocks as a whole where all of it runs
    # static: verify whole blocks; early_stop and lagged: as much as pays by confidence and cost, or plain decoding
    planner: PlannerKind = "static"
    # What the target runs where requests verify different numbers of rows. compact: just those, packed; full: all are
    # padded to the longest; cap_accept: whole blocks, of which no more is committed (to compare plans by)
    verify_rows: VerifyRows = "compact"
    costs: Literal["measure"] | Path | None = None  # of rounds: a file of `dspark profile`, or measured at the start
    # What each position's confidence logit is divided by; None = 1
    confidence_temperatures: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    # Record decode rounds, once for each size, and replay them: as CUDA graphs on a CUDA device; on the CPU as FX
    # graphs, which save nothing but show what can be recorded. Answers are the same. Off until it has been run on a GPU
    graphs: Literal["off", "on"] = "off"
    # How rows read the cache. sdpa: keys and values of all requests are gathered; flex: they are read where they lie,
    # if block and head sizes are powers of two from 16 on
    attention: Literal["sdpa", "flex"] = "sdpa"
    record_rounds: bool = False  # keep a RoundRecord of every round of requests that speculate, for evaluation

    @model_validator(mode="after")
    def _blocks_are_whole(self) -> Self:
        if self.verification == "block" and self.planner != "static":
            raise ValueError(
                f"verification block needs verify lengths that do not depend on the drafts: planner {self.planner} "
                "goes with verification token"
            )
        return self

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
    weights: Literal["stored", "int8"] = "stored"
    """int8: round the weights of the target's linear layers to 8 bits; answers then follow that target. CPU only."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; by default as many as there are cores."""
    num_draft_tokens: int | None = Field(None, ge=1)
    """Verify at most this many drafts a round; by default all."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share both models, as many as torchrun starts: torchrun --nproc-per-node N -m dspark …"""

    @model_validator(mode="after")
    def _quantised_weights_are_whole(self) -> Self:
        if self.weights != "stored" and self.tensor_parallel > 1:
            raise ValueError(f"weights {self.weights} cannot be shared among processes: set tensor_parallel to 1")
        return self


class PlanOptions(Settings):
    """How many drafts are verified, and whether any are made."""

    costs: Path | None = None
    """A table of `dspark profile`. By it only drafts that pay are verified, and none made where plain decoding is
    faster; without one every draft is verified."""
    planner: PlannerKind | None = None
    """early_stop plans by this round's confidences, lagged by those of two rounds ago, static verifies every draft; by
    default early_stop where there are costs, else static."""

    def apply(self, settings: EngineSettings) -> EngineSettings:
        """The settings with this plan."""
        planner = self.planner or ("static" if self.costs is None else "early_stop")
        return settings.replace(planner=planner, costs=self.costs)


class ProfileOptions(Settings):
    """Measure what rounds take on this machine, and write the table that planners read.

    Made-up requests, 1, 2, 4, ... up to max_batch at once, are decoded plainly and with more and more drafts each; the
    table holds medians and never falls with more rows. Give it to `dspark generate --costs`, to `dspark chat --costs`
    or, as `costs`, to the engine's settings. Measure again for another machine, number of threads, target or drafter.

    Example: dspark profile --out costs.json --max-batch 32
    """

    out: Path = Path("costs.json")
    """The file to write."""
    max_batch: int = Field(32, ge=1)
    """Requests decoded together, at most."""
    shape: Literal["rounds", "additive", "diagonal"] = "rounds"
    """rounds: for this engine, with drafting and plain rounds told apart. additive, diagonal: an SPS table for SGLang,
    drafting counted in."""
    quick: bool = False
    """Fewer repetitions and fewer points, as at the start of an engine with costs = "measure"."""
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the figures as one JSON object instead of a table."""
    model: ModelOptions = ModelOptions()
