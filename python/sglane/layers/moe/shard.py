"""Which routed experts a rank holds."""
from typing import NamedTuple


class ExpertShard(NamedTuple):
    """Experts are cut into `size` neighbouring ranges as even as can be; with fewer experts than ranks, some hold none."""

    rank: int
    size: int

    def held(self, num_experts: int) -> range:
        """The experts of this rank."""
        return range(self.rank * num_experts // self.size, (self.rank + 1) * num_experts // self.size)


#: One rank holds all.
ALL_EXPERTS = ExpertShard(0, 1)
