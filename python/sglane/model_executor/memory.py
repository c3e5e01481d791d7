"""How many pages fit into the memory budget of a rank, on the device and in the host tier."""
from pathlib import Path

import torch

from sglane.plan.step_plan import PlaneSpec
from sglane.server_args import ServerArgs

#: Share of the device memory for weights and KV pool, unless --mem-fraction-static says otherwise.
DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.85}
#: KV pool of all ranks of a CPU server, unless --max-total-tokens or --mem-fraction-static is given.
DEFAULT_CPU_KV_BYTES = 4 << 30
#: Share of the RAM that pools and weights may take together; the rest is for activations, the other processes of the server, the system.
MAX_FRACTION = 0.95


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
            budget = int(available / num_sharers * MAX_FRACTION) - fixed_bytes  # asked for by name: all that there is
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


def host_rows(args: ServerArgs, available: int, taken_bytes: int, record_bytes: int) -> int:
    """Rows of one lane in the host tier that there is room for, sink row included; 0 without a host tier. With --hicache-size it is that
    number of bytes, a total for all planes. available: RAM in bytes, which the ranks of a node share evenly; taken_bytes: what this rank's
    weights, scratch memory and device pool take of its share.

    Raises MemoryError naming the flag, before anything is allocated.
    """
    if not args.enable_hierarchical_cache:
        return 0
    left = int(available / args.ranks_per_node * MAX_FRACTION) - taken_bytes
    if args.hicache_size is not None:
        wanted = int(args.hicache_size * 1e9)
        if wanted > left:
            raise MemoryError(f"--hicache-size {args.hicache_size:g} needs {wanted / 2**30:.2f} GiB of RAM per rank, but {max(left, 0) / 2**30:.2f} "
                              "GiB are left")
        if wanted < 2 * record_bytes:
            raise MemoryError(f"--hicache-size {args.hicache_size:g} is less than two records of {record_bytes} bytes; raise it or lower --page-size")
        return wanted // record_bytes
    if left < 2 * record_bytes:
        raise MemoryError(f"--enable-hierarchical-cache: no room for a host tier: {max(left, 0) / 2**30:.2f} GiB are left for records of "
                          f"{record_bytes} bytes; lower --max-total-tokens or --mem-fraction-static")
    return left // record_bytes


def check_host_size(args: ServerArgs, available: int) -> None:
    """Before the weights are read, which may take minutes. Raises MemoryError if --hicache-size does not fit even without them."""
    if args.enable_hierarchical_cache and args.hicache_size is not None:
        host_rows(args, available, 0, 1)
