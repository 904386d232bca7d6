"""The prefix cache's index: which block holds the keys and values of which tokens, after which tokens.

A block is known by a chain of SHA-256 digests, each over the one before it and the block's token ids, and by its
context: what the drafter's cache holds beside the target's keys and values. There it is None (nothing was injected), or
0, or, for a drafter whose context reads the token after each row, the token that follows the block.
"""

from array import array
from collections.abc import Set
from hashlib import sha256

from dspark.engine.request import Request

Context = int | None


class PrefixIndex:
    """Full blocks of committed tokens. Only blocks that end before a request's last committed row are listed.

    So no round writes into a listed block: a chain drafter's first row stands on the last committed one.
    """

    def __init__(self, block_size: int, reads_next: bool = False, enabled: bool = True) -> None:
        self.block_size = block_size
        self.reads_next = reads_next
        self.enabled = enabled
        self._blocks: dict[bytes, dict[Context, int]] = {}
        self._keys: dict[int, tuple[bytes, Context]] = {}

    def __contains__(self, block: int) -> bool:
        """Whether a block's content is known."""
        return block in self._keys

    @property
    def blocks(self) -> Set[int]:
        """All blocks whose content is known."""
        return self._keys.keys()

    def match(self, request: Request) -> list[int]:
        """The blocks that hold the longest known prefix of a request, its last known token left out.

        A request that speculates takes blocks with its drafter's context alone, a plain one takes any.
        """
        found: list[int] = []
        for i in range(self._num_full(request.num_known)):
            known = self._blocks.get(self._digest(request, i), {})
            block = known.get(self._context(request, i)) if request.speculates else next(iter(known.values()), None)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, request: Request) -> None:
        """List the blocks that a request has filled since it was last seen; a content listed already stays as it is."""
        for i in range(request.num_listed, self._num_full(request.context_len)):
            block, digest, context = request.block_table[i], self._digest(request, i), self._context(request, i)
            known = self._blocks.setdefault(digest, {})
            if context not in known:
                known[context] = block
                self._keys[block] = digest, context
            request.num_listed = i + 1

    def forget(self, block: int) -> None:
        """A block gets other content, or has gone bad."""
        key = self._keys.pop(block, None)
        if key is not None:
            digest, context = key
            del self._blocks[digest][context]
            if not self._blocks[digest]:
                del self._blocks[digest]

    def is_computing(self, request: Request, num_found: int, other: Request) -> bool:
        """Whether `other`, whose prompt is under way, will list the first block that `request` did not find."""
        i = num_found
        if i >= self._num_full(request.num_known) or not other.num_listed <= i < self._num_full(other.num_known):
            return False
        same = self._digest(request, i) == self._digest(other, i)
        return same and (not request.speculates or self._context(request, i) == self._context(other, i))

    def _num_full(self, num_tokens: int) -> int:
        """Blocks of so many tokens that are full and not the last one's."""
        return (num_tokens - 1) // self.block_size if self.enabled else 0

    def _context(self, request: Request, i: int) -> Context:
        if not request.speculates:
            return None
        end = (i + 1) * self.block_size
        return request.ids(end, end + 1)[0] if self.reads_next else 0

    def _digest(self, request: Request, i: int) -> bytes:
        """The digest of a request's block i, computed once; all tokens of the block must be known."""
        digests = request.digests
        while len(digests) <= i:
            begin = len(digests) * self.block_size
            ids = request.ids(begin, begin + self.block_size)
            digests.append(sha256((digests[-1] if digests else b"") + array("q", ids).tobytes()).digest())
        return digests[i]
