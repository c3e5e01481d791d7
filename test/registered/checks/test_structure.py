"""The repository keeps its own rules, and each rule can fail: it is fed a snippet that breaks it."""
import os
import subprocess
import sys

import pytest

from kits.structure import budgets, floors, habits, words, writers
from kits.structure.__main__ import RULES
from kits.structure.source import PACKAGE_ROOT, Source


@pytest.mark.parametrize("name", RULES)
def test_the_repository_keeps(name):
    violations = sorted(RULES[name]())
    assert not violations, "\n" + "\n".join(map(str, violations))


def found(rule, text, module="sglane.managers.thing", **more):
    return [violation.what for violation in rule([Source.parse(module, text)], **more)]


# floors


@pytest.mark.parametrize(("module", "text"), [
    ("sglane.mem_cache.tree", "from sglane.managers.request import Request"),  # up, in one tower
    ("sglane.mem_cache.tree", "def f():\n    from sglane.managers import request"),  # inside a function
    ("sglane.mem_cache.tree", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sglane.managers.request"),
    ("sglane.managers.thing", "from sglane.layers.norm import RMSNorm"),  # across towers, though that floor is higher
    ("sglane.model_executor.runner", "from sglane.mem_cache.page_layout import PageLayout"),  # across towers, though it is lower
    ("sglane.entrypoints.http_server", "from sglane.managers import scheduler"),
    ("sglane.utils.ipc", "from sglane.plan import io_struct"),
    ("sglane.configs.model_config", "from sglane.plan.step_plan import PlaneSpec"),  # same floor
    ("sglane.plan.step_plan", "from ..server_args import ServerArgs"),  # relative
    ("sglane.managers.thing", "import importlib\nimportlib.import_module('sglane.launch_server')"),
    ("sglane.managers.thing", "import importlib\nimportlib.import_module(f'sglane.models.{name}')"),
    ("sglane.managers.thing", "from sglane import nowhere"),
    ("sglane.nowhere", "import os"),
])
def test_floors_refuse(module, text):
    assert len(found(floors.check_floors, text, module)) == 1


@pytest.mark.parametrize(("module", "text"), [
    ("sglane.managers.thing", "from sglane.mem_cache import kv_ledger\nfrom sglane.plan import step_plan\nfrom sglane.utils import fallback"),
    ("sglane.mem_cache.tree", "from sglane.mem_cache.radix_key import RadixKey\nfrom .radix_key import RadixKey"),
    ("sglane.launch_server", "from sglane.entrypoints.processes import launch\nfrom sglane.server_args import parse_args"),
    ("sglane.entrypoints.http_server", "from sglane import __version__"),
    ("sglane", "__version__ = '1'"),
])
def test_floors_allow(module, text):
    sources = floors.check_floors([Source.parse(module, text), Source.parse("sglane", "__version__ = '1'", "python/sglane/__init__.py")])
    assert [violation.what for violation in sources if "__version__" not in violation.what] == []


def test_planner_is_light_sees_through_our_modules():
    chain = [
        Source.parse("sglane.managers.thing", "def f():\n    from sglane.utils.arrays import pad"),
        Source.parse("sglane.utils.arrays", "from sglane.utils import deep"),
        Source.parse("sglane.utils.deep", "def f():\n    import torch.nn"),
        Source.parse("sglane.layers.norm", "import torch"),  # not reached by the planner: fine
    ]
    assert [violation.path for violation in floors.check_planner_is_light(chain)] == ["python/sglane/utils/deep.py"]


def test_planner_processes_load_no_torch():
    """At run time too, third-party packages included."""
    program = """if True:
        import pkgutil, sys, importlib
        import sglane.managers, sglane.mem_cache
        for package in (sglane.mem_cache, sglane.managers):
            for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
        print([name for name in ("torch", "transformers") if name in sys.modules])
    """
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


# budgets


def lines(count, indent=""):
    return "\n".join(f"{indent}x{number} = {number}" for number in range(count))


@pytest.mark.parametrize("text", [
    lines(451) + "\n",
    "def f():\n" + lines(60, "    "),
    "class A:\n    async def f(self):\n" + lines(60, "        "),
    "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...",
    "class A:\n    def __init__(self, a, b, c, d, *, e, f, g, h, **i): ...",
    "class A:\n    def f(self):\n" + "\n".join(f"        self.x{number} = {number}" for number in range(21)),
    "class A:\n" + lines(21, "    "),
])
def test_budgets_refuse(text):
    assert len(found(budgets.check_budgets, text)) == 1


@pytest.mark.parametrize("text", [
    lines(450) + "\n",
    "def f():\n" + lines(59, "    "),
    "class A:\n    def __init__(self, a, b, c, d, e, f, g, h): ...",
    "@dataclass(frozen=True)\nclass A:\n" + lines(21, "    "),
    "class A(msgspec.Struct, frozen=True):\n" + lines(21, "    "),
    "class A(BaseModel):\n    x = 1\nclass B(A):\n" + lines(21, "    "),
])
def test_budgets_allow(text):
    assert found(budgets.check_budgets, text) == []


# one writer


@pytest.mark.parametrize("text", [
    "def f(request):\n    request.phase = 1",
    "def f(request):\n    request.count += 1",
    "def f(request):\n    del request.phase",
    "def f(request):\n    request.pages[0] = 1",
    "def f(request):\n    request.tokens.append(1)",
    "def f(requests):\n    requests[0].phase = 1",
    "def f(request):\n    for request.phase in range(3): ...",
    "def f(a, request):\n    a, request.phase = 1, 2",
    "class Scheduler:\n    def f(self):\n        self.request.phase = 1",
    "class Scheduler:\n    def f(self):\n        self.request.pages.clear()",
    "from sglane.managers import request\nrequest.LIMIT = 1",
])
def test_one_writer_refuses(text):
    assert len(found(writers.check_one_writer, text)) == 1


@pytest.mark.parametrize("text", [
    "class A:\n    def f(self):\n        self.x = 1\n        self.x[0].append(2)\n        self.y.append(1)",
    "class Node:\n    def __init__(self):\n        self.parent = None\nclass Tree:\n    def f(self, node):\n        node.parent = 1",
    "class Node:\n    __slots__ = ('parent',)\ndef f(node):\n    node.parent = 1",
    "import torch\ntorch.backends.mkldnn.enabled = False",
    "def f(rows):\n    rows[0] = 1\n    rows.append(1)",
])
def test_one_writer_allows(text):
    assert found(writers.check_one_writer, text) == []


def test_one_writer_allow_list_is_exact():
    text = "def f(request):\n    request.phase = 1"
    assert found(writers.check_one_writer, text, allowed={("sglane.managers.thing", "request.phase"): "because"}) == []
    assert len(found(writers.check_one_writer, "x = 1", allowed={("sglane.managers.thing", "request.phase"): "because"})) == 1


# habits


@pytest.mark.parametrize("text", [
    "try:\n    f()\nexcept:\n    pass",
    "try:\n    f()\nexcept Exception:\n    pass",
    "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    print(error)",
    "try:\n    f()\nexcept AttributeError:\n    pass",
    "try:\n    import fast\nexcept ImportError:\n    fast = None",
    "import contextlib\nwith contextlib.suppress(Exception):\n    f()",
    "hasattr(a, 'b')",
    "getattr(a, 'b', None)",
    "setattr(a, 'b', 1)",
    "object.__setattr__(self, 'b', 1)",
    "a.__dict__['b'] = 1",
    "class IOMixin: ...",
    "def f():\n    global x\n    x = 1",
    "from contextvars import ContextVar",
    "import threading\nlocal = threading.local()",
    "import os\nx = os.environ['HOME']",
    "import os\nx = os.environ.get('HOME')",
    "import os\nx = os.getenv('HOME')",
])
def test_habits_refuse(text):
    assert len(found(habits.check_habits, text)) == 1


@pytest.mark.parametrize("text", [
    "try:\n    f()\nexcept ValueError:\n    pass",
    "try:\n    f()\nexcept Exception:\n    clean_up()\n    raise",
    "getattr(a, name)",
    "import os\nstart(env={**os.environ, 'A': 'b'})",
])
def test_habits_allow(text):
    assert found(habits.check_habits, text) == []


@pytest.mark.parametrize(("text", "number"), [
    ("from sglane.utils import fallback\nfallback.count('known')", 0),
    ("from sglane.utils.fallback import count\ncount('known')", 0),
    ("from sglane.utils import fallback\nfallback.count('unknown')\nfallback.count('known')", 1),
    ("from sglane.utils import fallback\nfallback.count(name)\nfallback.count('known')", 1),
    ("'abc'.count('known')", 1),  # declared, never taken
])
def test_fallbacks(text, number):
    assert len(found(habits.check_fallbacks, text, declared={"known": "reason"})) == number


# words


@pytest.mark.parametrize("text", [
    "see https" + "://somewhere.org/page",
    "pip install --index-url https" + "://internal.host/simple torch",
    "py" + "pi.org",
    "cat /wo" + "rk/notes",
    "a helper ses" + "sion wrote this",
])
def test_words_refuse(text):
    assert words.check_words({"README.md": text})


@pytest.mark.parametrize("text", [
    "curl http://127.0.0.1:30000/v1/models", "http://localhost:30000", "http://www.apache.org/licenses/", "a network / a working / rooted tree",
    "https://api.example.com/v1", 'f"http://[{host}]:{port}"', 'f"http://127.0.0.1:{port}"',
])
def test_words_allow(text):
    assert words.check_words({"README.md": text}) == []
