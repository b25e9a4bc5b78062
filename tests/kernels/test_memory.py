"""Room for results."""

from __future__ import annotations

import pytest
import torch

from mergekit_iso.kernels.memory import room_for


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5), (2, 3, 4)])
def test_room_is_like_what_it_is_for(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=dtype)
    for like in (x, x.mT if len(shape) > 1 else x):
        room = room_for(like)
        assert (room.shape, room.dtype, room.device) == (like.shape, like.dtype, like.device)
        assert room.is_contiguous()
        assert torch.equal(room.copy_(like), like)
