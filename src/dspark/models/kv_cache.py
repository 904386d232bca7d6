"""Keys and values of all requests, in pages.

Shapes: L layers, N rows written, Hkv key/value heads, D head dimension; Hkv and D may differ between the layers.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

AttentionName = Literal["sdpa", "flex"]


class PagedKVCache:
    """Storage for `num_blocks` pages of `block_size` tokens in each of `num_layers` layers.

    Token `p` of a request lies in slot `block_table[p // block_size] * block_size + p % block_size`. Block 0 belongs to
    no request: it stays zero and stands where a table has no page, so what a masked row reads is always finite.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`num_kv_heads` and `head_dim` are one number for all layers or one for each."""
        heads = [num_kv_heads] * num_layers if isinstance(num_kv_heads, int) else num_kv_heads
        dims = [head_dim] * num_layers if isinstance(head_dim, int) else head_dim
        self.attention: AttentionName = "sdpa"  # how it is read
        self.num_blocks = num_blocks
        self.block_size = block_size
        shapes = [(num_blocks * block_size, h, d) for h, d in zip(heads, dims, strict=True)]
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]  # L of [slots, Hkv, D]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.layers = list(zip(self.k, self.v, strict=True))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [N, Hkv, D] in the slots i64 [N] of a layer."""
        keys, values = self.layers[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Make these blocks zero again."""
        for stored in (*self.k, *self.v):
            stored.view(self.num_blocks, self.block_size, *stored.shape[1:])[list(blocks)] = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the storage in bytes."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)
