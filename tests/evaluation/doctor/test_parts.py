"""The parts of the doctor: changes, their measure, the judge, the vocabulary, and what it says of unusual pairs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_faults import PROMPTS, doctor_options
from tiny_pair import LETTERS, SPECIALS, TAPS, tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.drafters.factory import make_drafter
from dspark.drafters.layouts.deepspec import write_drafter
from dspark.errors import CheckpointError, ConfigError, RequestError
from dspark.evaluation.doctor import variants
from dspark.evaluation.doctor.examine import examine
from dspark.evaluation.doctor.judge import Judged, check_norm, check_states
from dspark.evaluation.doctor.laws import Score, draft_logits
from dspark.evaluation.doctor.pair import Pair
from dspark.evaluation.doctor.repairs import Family, Tried, compare, judge_families
from dspark.evaluation.doctor.variants import Variant, vary
from dspark.evaluation.doctor.vocabulary import check_vocabulary
from dspark.models.weights import save_decoder
from dspark.training.build import drafter_config, initialise
from dspark.training.config import DrafterShape

CHANGES = [
    Variant("wrong slot convention", "", "", {"sample_from_anchor": False}),
    Variant("causal mask", "", "", {"block_attention": "causal"}),
    Variant("wrong mask id", "", "", {"mask_token_id": 5}),
    Variant("shifted position", "", "", position_offset=1),
    Variant("norm skipped", "", "", skipped_norm="norm"),
    Variant("norm skipped", "", "", skipped_norm="hidden_norm"),
    Variant("swapped head", "", "", head="left out"),
    Variant("swapped head", "", "", head="exchanged"),
    Variant("dtype", "", "", dtype=torch.bfloat16),
]


def logits(drafter: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 28, (1, 20), generator=generator)
    features = torch.randn(1, 20, len(TAPS), 32, generator=generator)
    with torch.no_grad():
        return draft_logits(drafter, ids, features, torch.tensor([[4, 9, 15]]))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.fault)
def test_a_change_shows_and_leaves_the_drafter_as_it_is(
    change: Variant, opened: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its copy is built on the meta device or not."""
    before = logits(opened.trained)
    changed = logits(vary(opened.trained, opened.target.decoder, change))
    width = changed.shape[2]
    assert float((changed - before[:, :, :width]).abs().max()) > 1e-3
    monkeypatch.setattr(variants, "LARGE", 0)
    assert torch.equal(logits(vary(opened.trained, opened.target.decoder, change)), changed)
    assert torch.equal(logits(opened.trained), before)


def scores(agreement: list[float], overlap: list[float]) -> Score:
    """Sixty anchors of two slots; the figures are of each half."""
    halves = [torch.tensor([agreement, overlap])[:, i, None, None].expand(2, 30, 2) for i in (0, 1)]
    measures = torch.cat(halves, dim=1) + 1e-3 * torch.randn(2, 60, 2, generator=torch.Generator().manual_seed(0))
    return Score(measures[0], measures[1], torch.arange(60))


@pytest.mark.parametrize(
    ("agreement", "overlap", "is_real"),
    [
        ([0.6, 0.6], [0.5, 0.5], True),
        ([0.3, 0.3], [0.5, 0.5], False),  # blunter or sharper laws overlap more and are chosen no more often
        ([0.9, 0.1], [0.9, 0.0], False),  # better here, worse there: chance
        ([0.31, 0.31], [0.305, 0.305], False),  # too little to matter
    ],
)
def test_only_a_gain_of_both_measures_beyond_chance_counts(
    agreement: list[float], overlap: list[float], is_real: bool
) -> None:
    gain = compare(scores([0.3, 0.3], [0.3, 0.3]), scores(agreement, overlap))
    assert gain.is_real == is_real
    assert gain.agreement == pytest.approx((0.3, sum(agreement) / 2), abs=1e-3)


def test_the_change_that_gains_the_most_names_the_fault() -> None:
    base = scores([0.3, 0.3], [0.3, 0.3])
    some, more = Variant("wrong layer", "some", "do this"), Variant("scaled rope", "more", "do that")
    tried = [
        (Family("layer ids", [some]), Tried(some, compare(base, scores([0.4, 0.4], [0.4, 0.4])))),
        (Family("rotation", [more]), Tried(more, compare(base, scores([0.7, 0.7], [0.6, 0.6])))),
        (Family("mask id", [], "no block"), None),
    ]
    layer, rotation, mask = judge_families(tried)
    assert (layer.status, rotation.status, mask.status) == ("ok", "failed", "skipped")
    assert rotation.fault == "scaled rope"
    assert rotation.change == "do that"
    assert "from 0.30 to 0.70" in rotation.finding
    assert "gains less than more" in layer.finding


def judged() -> Judged:
    generator = torch.Generator().manual_seed(1)
    states, last = torch.randn(6, 5, 8, generator=generator), torch.randn(6, 8, generator=generator)
    normed, unnormed = torch.randn(2, 6, 20, generator=generator)
    return Judged((-1, 0, 1, 2, 3), states, states, last, last, normed, normed, unnormed)


def test_the_judge_tells_what_parts() -> None:
    same = judged()
    assert check_states(same, TAPS, 1e-3).status == "ok"
    shifted = check_states(same._replace(ours=same.theirs.roll(-1, dims=1)), TAPS, 1e-3)
    assert shifted.fault == "wrong layer"
    assert "the tap of layer 0 holds the output of layer 1" in shifted.finding
    later = same.theirs.clone()
    later[1:, 2:] += 1.0
    rotated = check_states(same._replace(ours=later), TAPS, 1e-3)
    assert rotated.fault == "scaled rope"
    assert "from layer 1 on" in rotated.finding
    assert check_states(same._replace(ours=same.theirs + 1.0), TAPS, 1e-3).fault == "target states"
    assert check_norm(same, 1e-3).status == "ok"
    assert check_norm(same._replace(our_logits=same.unnormed_logits), 1e-3).fault == "norm skipped"
    assert check_norm(same._replace(our_logits=same.their_logits + 1.0), 1e-3).fault == "target states"
    assert (
        check_norm(same._replace(our_logits=same.their_logits + 1.0, our_last=same.their_last + 1.0), 1e-3).status
        == "skipped"
    )


def test_a_tokenizer_is_judged_without_a_record(opened: Pair) -> None:
    def check(other: PreTrainedTokenizerFast) -> str | None:
        return check_vocabulary(
            replace(opened, provenance={}, target=replace(opened.target, tokenizer=other)), PROMPTS
        ).fault

    assert check(tokenizer()) is None
    assert check(tokenizer(LETTERS + "yz")) == "other tokenizer", "more tokens than the target has"
    plain = tokenizer("".join(LETTERS))
    words = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, unk_token="<unk>")
    config = opened.target.config.replace(eos_token_ids=(len(SPECIALS),))
    opened.target.decoder.config = config
    assert check(words) == "other tokenizer", "the target ends its turns with an ordinary letter"


def test_text_that_surprises_the_target_accuses_the_tokenizer(opened: Pair) -> None:
    opened.target.decoder.lm_head.weight.mul_(-4.0)  # the likeliest letters become the least likely
    long = replace(opened, provenance={})
    assert check_vocabulary(long, ["abcdefghijklmnop"]).fault == "other tokenizer"
    assert check_vocabulary(long, ["abcd"]).fault is None, "too few tokens for a verdict"


def test_a_chain_has_no_block_to_misread(opened: Pair, tmp_path: Path) -> None:
    """An untrained EAGLE-3 drafter: serving equals training, the block's conventions are skipped, and it is weak."""
    decoder = opened.target.decoder
    save_decoder(decoder, opened.target.tokenizer, tmp_path / "target")
    shape = DrafterShape.from_dict({"algorithm": "eagle3", "ttt_length": 3}, "test")
    drafter = make_drafter(drafter_config(shape, decoder, TAPS), decoder)
    initialise(drafter, torch.Generator().manual_seed(0))
    write_drafter(drafter, tmp_path / "drafter", torch.float32)
    diagnosis = examine(doctor_options(tmp_path, transformers=False))
    status = {check.name: check.status for check in diagnosis.checks}
    assert status["draft logits"] == status["rounds"] == "ok"
    assert [status[name] for name in ("slot convention", "mask id", "block attention", "sequential head")] == [
        "skipped"
    ] * 4
    assert status["target digest"] == "skipped", "the files do not name their target"
    assert diagnosis.first is not None
    assert diagnosis.first.fault == "weak drafter"


def test_what_is_no_pair_is_refused(pair: Path, tmp_path: Path) -> None:
    options = doctor_options(pair, transformers=False)
    with pytest.raises(ConfigError, match="pass --drafter DIRECTORY"):
        examine(options.replace(model=options.model.replace(drafter="none")))
    with pytest.raises(ConfigError, match="tensor_parallel: the doctor looks at whole models"):
        examine(options.replace(model=options.model.replace(tensor_parallel=2)))
    with pytest.raises(ConfigError, match="weights: the doctor compares with transformers"):
        examine(options.replace(model=options.model.replace(weights="int8")))
    with pytest.raises(CheckpointError, match="no such model"):
        examine(options.replace(model=options.model.replace(target=str(tmp_path / "nowhere"))))
    with pytest.raises(RequestError, match="prompt is empty"):
        examine(options.replace(prompt=(" ",)))


def test_broken_values_are_named(opened: Pair, tmp_path: Path, pair: Path) -> None:
    opened.trained.backbone.fc.weight.data[0, 0] = torch.nan
    write_drafter(opened.trained, tmp_path / "drafter")
    options = doctor_options(pair)
    first = examine(options.replace(model=options.model.replace(drafter=str(tmp_path / "drafter")))).first
    assert first is not None
    assert first.fault == "damaged file"
    assert "fc.weight" in first.finding
