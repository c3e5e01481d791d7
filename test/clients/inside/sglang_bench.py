"""Start sglang's serving benchmark from its wheel alone. Usage: sglang_bench.py ARGUMENTS OF THE BENCHMARK...

The benchmark takes one string from the engine's disaggregation module, whose import would pull in torch, CUDA and the whole engine. That module, and
the `__init__` files above it, are replaced by empty ones; the benchmark's own code runs as it was released.
"""
import importlib.machinery
import importlib.util
import runpy
import sys

PARENTS = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")
STAND_IN = "sglang.srt.disaggregation.utils"


def empty_module(name: str, folders: list[str] | None):
    """A module without code. folders: where its submodules are, None: it is no package."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=folders is not None)
    spec.submodule_search_locations = folders
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return module


def main() -> None:
    found = importlib.util.find_spec("sglang")
    root = found.submodule_search_locations[0]
    for name in PARENTS:
        empty_module(name, ["/".join([root, *name.split(".")[1:]])])
    empty_module(STAND_IN, None).FAKE_BOOTSTRAP_HOST = "2.2.2.2"
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)


main()
