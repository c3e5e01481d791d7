"""Memory of a server's processes over many rounds of load."""
import statistics

import psutil

from kits.server import Server

#: What a process may grow from the median of the second third's rounds to that of the last third's. Those lie a third of the requests apart; the
#: allocators' own steps are some MiB. In the long run a leak of 24 KiB a request, one page of a request's tokens, would be 16 MiB.
MAX_GROWTH_BYTES = 16 << 20


def resident(server: Server) -> dict[str, int]:
    """Bytes by process name; the grammar worker comes and goes."""
    family = {"front": psutil.Process(server.pid), "planner": server.processes("planner")[0]}
    family |= {f"executor {i}": process for i, process in enumerate(server.processes("executor"))}
    return {name: process.memory_info().rss for name, process in family.items()}


def growth(samples: list[dict[str, int]]) -> dict[str, float]:
    """Bytes by process: median of the last third of the rounds less that of the second third. The first third warms up."""
    third = len(samples) // 3

    def middle(name: str, part: list[dict[str, int]]) -> float:
        return statistics.median(sample[name] for sample in part)

    return {name: middle(name, samples[2 * third :]) - middle(name, samples[third : 2 * third]) for name in samples[0]}
