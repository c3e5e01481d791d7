"""Loads and backups of the host tier against memcpy of the same bytes.

    PYTHONPATH=python python benchmark/hicache/bench_transfer.py [--total-mb 256] [--rounds 9] [--device cpu]

Each round times a backup layer by layer (as in a forward), a backup of whole pages, and a load, each right after a memcpy of as many bytes (one
call), so that whatever else runs on the machine hits both. Figures are medians over the rounds; a ratio of 1 is the bandwidth of memcpy, by the
clock and by the CPU time of the process (which does not count what others took). Rows are scattered at random on both sides. All memory has
been written before: at its first touch the system hands it out page by page, which takes several times as long; an idle rank takes its
memory ahead for that reason (see pool_memory).
"""
import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from sglane.forward.layer_hooks import Holds
from sglane.model_executor.copy_engine import CopyEngine
from sglane.model_executor.copy_jobs import CopyLayout
from sglane.model_executor.host_pool import HostPool
from sglane.model_executor.kv_pool import KVPool, plane_specs
from sglane.plan.step_plan import Backup, Load, StepPlan, TicketEnded

#: name -> planes, as ModelSizes.kv_planes says them. GQA: SmolLM2-360M; MLA with an index plane: DeepSeek-V3.2.
MODELS = {
    "gqa": (("target.kv", 30, 384),),
    "mla": (("target.kv", 61, 576), ("target.index", 61, 128)),
}


class Ends:
    """Counts tickets that have ended."""

    def __init__(self) -> None:
        self._count = threading.Semaphore(0)

    def send(self, message: TicketEnded) -> None:
        self._count.release()

    def close(self) -> None:
        pass

    def wait(self) -> None:
        self._count.acquire()


class World:
    """A device pool and a host pool of the same number of rows, all touched."""

    def __init__(self, planes: tuple[tuple[str, int, int], ...], page_size: int, total_bytes: int, device: torch.device):
        specs = plane_specs(planes, torch.bfloat16)
        record_bytes = 2 * page_size * sum(num_layers * width for _, num_layers, width in planes)
        self.num_pages = max(2, total_bytes // record_bytes)
        self.num_bytes = self.num_pages * record_bytes
        self.num_layers = planes[0][1]
        pool = KVPool(specs, self.num_pages + 1, page_size, 1, 0, torch.bfloat16, device)
        host = HostPool(specs, self.num_pages + 1, page_size, 1, 0, torch.bfloat16, device)
        for plane in pool.planes.values():
            plane.buffer.fill_(1)
        host.buffer.fill_(1)
        self._device = device
        self._flat = torch.ones(self.num_bytes, dtype=torch.uint8, device=device), torch.ones(self.num_bytes, dtype=torch.uint8,
                                                                                             pin_memory=device.type == "cuda")
        self._ends = Ends()
        written_after = {name: tuple(range(num_layers)) for name, num_layers, _ in planes}
        self.engine = CopyEngine(pool, host, CopyLayout(specs, page_size, written_after), Holds(0), lambda: self._ends)
        rng = np.random.default_rng(0)
        self._device_pages, self._host_pages = (rng.permutation(np.arange(1, self.num_pages + 1, dtype=np.int32)).tobytes() for _ in range(2))
        self._step = 0

    def memcpy(self) -> None:
        self._flat[1].copy_(self._flat[0])
        self._synchronize()

    def follow(self) -> None:
        """Backup that begins when the layers but the last have been computed."""
        self._begin(backups=[Backup(1, self._device_pages, self._host_pages, False)])
        for layer in range(self.num_layers - 1):
            self.engine.layer_written(layer)
        time.sleep(0.001)  # it has begun: it would copy whole pages, if all layers were there
        self.engine.layer_written(self.num_layers - 1)
        self._ends.wait()

    def whole(self) -> None:
        self._begin(backups=[Backup(1, self._device_pages, self._host_pages, True)])
        self._ends.wait()

    def load(self) -> None:
        self._begin(loads=[Load(1, self._host_pages, self._device_pages)])
        self._ends.wait()

    def _begin(self, **orders: list) -> None:
        self._step += 1
        self.engine.begin(StepPlan(self._step, **orders))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of CPU."""
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - cpu


def compare(call: Callable[[], None], memcpy: Callable[[], None], rounds: int) -> tuple[float, float, float, float]:
    """Medians: seconds of memcpy and of `call`, memcpy / call by the clock and by CPU time. The first round is not counted."""
    pairs = [(timed(memcpy), timed(call)) for _ in range(rounds + 1)][1:]
    found = [(base[0], own[0], base[0] / own[0], base[1] / own[1]) for base, own in pairs]
    return tuple(statistics.median(column) for column in zip(*found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-mb", type=int, default=256, help="bytes of one copy, in 10^6")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("model  page  pages  copy                memcpy GB/s  copy GB/s  ratio  CPU ratio")
    for model, planes in MODELS.items():
        for page_size in args.page_sizes:
            world = World(planes, page_size, args.total_mb * 10**6, torch.device(args.device))
            gc.freeze()  # as a rank does
            for name, call in (("backup, by layer", world.follow), ("backup, whole", world.whole), ("load, by layer", world.load)):
                base_s, own_s, ratio, cpu_ratio = compare(call, world.memcpy, args.rounds)
                rates = world.num_bytes / base_s / 1e9, world.num_bytes / own_s / 1e9
                print(f"{model:5} {page_size:5} {world.num_pages:6}  {name:18} {rates[0]:12.1f} {rates[1]:10.1f} {ratio:6.2f} {cpu_ratio:10.2f}",
                      flush=True)
            world.engine.close(finish=True)


if __name__ == "__main__":
    main()
