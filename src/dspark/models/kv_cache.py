"""Keys and values of all requests, in pages.

Shapes: L layers, N rows written, Hkv key/value heads, D head dimension.
"""

import torch
from torch import Tensor


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
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # [L, num_blocks * block_size, Hkv, D]
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.k.unbind(), self.v.unbind(), strict=True))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [N, Hkv, D] in the slots i64 [N] of a layer."""
        keys, values = self.layers[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    @property
    def num_bytes(self) -> int:
        """Memory of the storage in bytes."""
        return self.k.nbytes + self.v.nbytes
