"""The static plan at the ends of range."""

import torch

from dspark.spec.planner import static_plan


def test_the_whole_block_is_verified_unless_a_request_is_near_its_end() -> None:
    wanted = torch.tensor([100, 3, 1, 0, 100, 100, 2])
    room = torch.tensor([100, 100, 100, 100, 2, 1, 9])
    assert static_plan(7, 4, wanted, room).verify_lens.tolist() == [5, 3, 1, 1, 2, 1, 2]


def test_without_drafts_one_row_is_verified() -> None:
    many = torch.tensor([100, 1])
    assert static_plan(2, 0, many, many).verify_lens.tolist() == [1, 1]
