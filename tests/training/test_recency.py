"""Block drafters whose heads begin by looking at the newest context row."""

from pathlib import Path

import pytest
import torch
from tiny_training import TAPS, Samples, losses, make_trainer

from dspark.drafters.dspark import BlockDrafter
from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.training.build import drafter_config, new_drafter
from dspark.training.config import DrafterShape, TrainSettings
from dspark.training.parallel import Ranks

SHAPE = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_size": 3,
    "mask_token_id": 1,
    "markov_rank": 4,
}


def drafter(target: Decoder, rows: Samples, recent_heads: int) -> BlockDrafter:
    config = drafter_config(DrafterShape.from_dict(SHAPE, "test"), target, TAPS).replace(head_dim=32)
    made = new_drafter(config, target, rows, 3, recent_heads)
    assert isinstance(made, BlockDrafter)
    return made


def share_on_newest(drafter: BlockDrafter, rows: Samples) -> torch.Tensor:
    """Attention that each slot's heads give the newest context row, over context and block: means [G, h]."""
    shares = []
    attention = drafter.backbone.layers[0].self_attn
    rows_of_block = drafter.config.query_rows
    for row in rows:
        length = len(row.token_ids) - rows_of_block
        context = drafter.backbone.project_context(row.features[:length])
        ids = torch.full((rows_of_block,), drafter.mask_token_id)
        ids[0] = row.token_ids[length]
        block = drafter.backbone.layers[0].input_layernorm(drafter.embed(ids))
        cos, sin = drafter.backbone.rotary(torch.arange(length + rows_of_block)[None], torch.float32)
        before, after = (cos[0, :length], sin[0, :length]), (cos[0, length:], sin[0, length:])
        queries = attention.queries(block, after)
        keys = torch.cat([attention.keys_values(context, before).keys, attention.keys_values(block, after).keys])
        keys = keys.repeat_interleave(attention.num_heads // attention.num_kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->qhk", queries, keys) * attention.scale
        shares.append(scores.softmax(-1)[..., length - 1])
    return torch.stack(shares).mean(dim=0)


@pytest.fixture(scope="module")
def leaning(rows: Samples) -> Samples:
    """The rows with features whose mean is not zero, as those of trained targets are."""
    return Samples(row._replace(features=row.features + 1.0) for row in rows)


@torch.no_grad()
def test_recent_heads_see_the_newest_context_row_and_the_others_do_not(target: Decoder, leaning: Samples) -> None:
    """Chance is about one in twenty."""
    shares = share_on_newest(drafter(target, leaning, 1), leaning)
    assert shares[:, 2:].min() > 0.3
    assert shares[:, :2].max() < 0.15


@torch.no_grad()
def test_their_values_are_the_context_feature_itself(target: Decoder, rows: Samples) -> None:
    made = drafter(target, rows, 2)
    context = made.backbone.project_context(rows[0].features)
    values = made.backbone.layers[0].self_attn.v_proj(context)
    assert torch.equal(values, context.repeat(1, 2))  # two heads as wide as the feature each


def test_a_run_with_them_trains(target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks) -> None:
    trainer = make_trainer(target, rows, tmp_path, alone, SHAPE, {"recent_heads": 1})
    trainer.run()
    assert trainer.step == 8
    without = make_trainer(target, rows, tmp_path / "without", alone, SHAPE, {})
    without.run()
    assert losses(tmp_path)[0] != losses(tmp_path / "without")[0]


def test_what_cannot_have_them_is_refused(target: Decoder, rows: Samples) -> None:
    with pytest.raises(ConfigError, match="recent_heads 3: the drafter has 2"):
        drafter(target, rows, 3)
    settings = {"cache": ["c"], "out": "o", "recent_heads": 1}
    for other in ({"drafter": SHAPE, "init_from": "d"}, {"drafter": {"algorithm": "eagle3"}}):
        with pytest.raises(ConfigError, match="recent_heads"):
            TrainSettings.from_dict(settings | other, "test").check_features()
