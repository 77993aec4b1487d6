"""Free KV blocks. Requests and the radix cache record which blocks they hold."""


class BlockPool:
    """Allocates block ids 1 … num_blocks - 1, low ids first. Block 0 stays zero and is read as padding by attention."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, in ascending runs where possible, so that a request's KV tends to be contiguous."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def free(self, block_ids: list[int]) -> None:
        self._free.extend(reversed(block_ids))
