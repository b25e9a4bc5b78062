"""What chunked work asks of the CPU's memory: that its pages are faulted in once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of up to 32 MB for the next ones of that size.

    At first it takes temporaries of more than 128 KB from the system and gives them back at
    once, and faulting in their pages costs several times the work that is done on them. It
    raises that limit when a larger block is freed (mallopt(3), M_MMAP_THRESHOLD), so one such
    block, never written to, is enough. Other allocators take no notice.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def room_for(x: Tensor) -> Tensor:
    """Return a contiguous tensor of x's shape, dtype and device, its values undefined.

    On the CPU from NumPy, which asks for huge pages: the first write into small ones takes
    five times as long as the write itself.
    """
    if x.device.type != "cpu" or x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    memory = torch.from_numpy(np.empty(x.nbytes, dtype=np.uint8))
    return memory.view(x.dtype).view(x.shape)
