"""Ragged rows: every real row lands where it belongs, and nothing else does."""

import pytest
import torch

from dspark.spec.layout import pack, row_tier, scatter


@pytest.mark.parametrize("lens", [[1], [3, 1, 4, 2], [1, 1, 1], [5, 5]])
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_go_out_and_come_back(lens: list[int], padding: int) -> None:
    rows = pack(torch.tensor(lens), sum(lens) + padding)
    assert rows.num_real == sum(lens)
    assert rows.num_rows == sum(lens) + padding
    assert list(zip(rows.requests.tolist(), rows.offsets.tolist(), strict=True)) == [
        *[(b, t) for b, count in enumerate(lens) for t in range(count)],
        *[(0, 0)] * padding,
    ]
    width = max(lens) + 1
    packed = torch.arange(1, rows.num_rows + 1).repeat(2, 1).T.float()
    back = scatter(packed, rows, len(lens), width)
    assert back.shape == (len(lens), width, 2)
    ran = torch.arange(width) < torch.tensor(lens)[:, None]
    assert back[ran].tolist() == packed[: rows.num_real].tolist()
    assert not back[~ran].any()


def test_rows_of_the_first_requests() -> None:
    rows = pack(torch.tensor([3, 1, 4, 2]), 12)
    some, alone = rows.first(4), pack(torch.tensor([3, 1]))
    assert (some.num_real, some.num_rows) == (alone.num_real, alone.num_rows)
    assert torch.equal(some.requests, alone.requests)
    assert torch.equal(some.offsets, alone.offsets)


def test_tiers_are_few_and_close() -> None:
    tiers = [row_tier(n) for n in range(1, 4097)]
    assert all(n <= tier <= max(n + 3, 1.15 * n) for n, tier in enumerate(tiers, start=1))
    assert tiers == sorted(tiers)
    assert [row_tier(tier) for tier in set(tiers)] == list(set(tiers))
    assert len(set(tiers)) < 100
