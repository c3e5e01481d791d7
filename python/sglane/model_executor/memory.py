"""How many pages fit into the memory budget of a rank."""
from pathlib import Path

import torch

from sglane.plan.step_plan import PlaneSpec
from sglane.server_args import ServerArgs

#: Share of the device memory for weights and KV pool, unless --mem-fraction-static says otherwise.
DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.85}
#: KV pool of all ranks of a CPU server, unless --max-total-tokens or --mem-fraction-static is given.
DEFAULT_CPU_KV_BYTES = 4 << 30


def available_bytes(device: torch.device) -> int:
    """Free memory of the device now: GPU memory, or RAM within the limits of the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def scratch_bytes(specs: list[PlaneSpec], scratch_tokens: int) -> int:
    """What attention holds of the prefixes of one layer: the rows that were fetched, and those put together for one extend."""
    return 2 * scratch_tokens * sum(spec.width * spec.num_bytes_per_element for spec in specs)


def pool_rows(args: ServerArgs, device: torch.device, available: int, fixed_bytes: int, page_bytes: int) -> int:
    """Rows of one lane, sink row included. `available`: device memory before the weights were loaded, in bytes; fixed_bytes: what weights and
    scratch memory take of it.

    Ranks on CPU share their node's memory evenly. Raises MemoryError naming the flags if not even one page fits.
    """
    num_sharers = args.ranks_per_node if device.type == "cpu" else 1
    fraction = args.mem_fraction_static or DEFAULT_FRACTION[device.type]
    budget = int(available / num_sharers * fraction) - fixed_bytes
    if args.max_total_tokens is not None:
        wanted = -(-args.max_total_tokens // (args.page_size * args.cp_size)) + 1
        if wanted * page_bytes > budget and args.mem_fraction_static is None:
            budget = int(available / num_sharers * 0.95) - fixed_bytes  # asked for by name: all that there is
        if wanted * page_bytes > budget:
            raise MemoryError(f"--max-total-tokens {args.max_total_tokens} needs {wanted * page_bytes / 2**30:.2f} GiB of KV pool per rank, "
                              f"but {max(budget, 0) / 2**30:.2f} GiB are left")
        return wanted
    if device.type == "cpu" and args.mem_fraction_static is None:
        budget = min(budget, DEFAULT_CPU_KV_BYTES // num_sharers)
    rows = budget // page_bytes
    if rows < 2:
        raise MemoryError(f"no room for a KV pool: {budget / 2**30:.2f} GiB are left for pages of {page_bytes} bytes; "
                          "raise --mem-fraction-static or lower --page-size")
    return rows
