"""The dashboard and the page about metrics name what the server exports, and all of it."""
import json
import re
import subprocess
import sys

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kits.fake_planner import STATE
from kits.structure.source import REPO
from sglane.observability.metrics import Metrics

PAGE = REPO / "docs" / "advanced_features" / "observability.md"
DASHBOARD = REPO / "docs" / "grafana" / "sglane.json"


def families():
    metrics = Metrics("a-model")
    metrics.http_received("/generate", "POST")
    metrics.http_answered("/generate", "POST", 200)
    return list(text_string_to_metric_families(metrics.as_text(STATE).decode()))


@pytest.fixture(scope="module")
def samples():
    """Sample name -> its labels."""
    return {sample.name: set(sample.labels) for family in families() for sample in family.samples}


@pytest.fixture(scope="module")
def expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_is_current():
    ran = subprocess.run([sys.executable, str(REPO / "scripts" / "gen-grafana"), "--check"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_dashboard_uses_exported_names_and_labels(samples, expressions):
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"(sglang:\w+)\{([^}]*)\}", expression)
        assert names, expression
        for name, chosen in names:
            assert name in samples, f"{name} is not exported"
            assert set(re.findall(r"(\w+)=~", chosen)) - {"instance"} <= samples[name], expression
            for by in re.findall(r"by \(([^)]*)\)", expression):
                assert set(by.split(", ")) <= samples[name], expression


def test_panels_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [(x, y) for panel in panels for place in [panel["gridPos"]]
             for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_the_page_lists_every_metric_and_no_other(samples):
    exported = {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples}
    listed = {f"sglang:{name}" for name in re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)}
    assert listed == exported


def test_the_examples_are_yaml():
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    probes = [yaml.safe_load(block) for block in blocks]
    assert any("livenessProbe" in probe for probe in probes if isinstance(probe, dict))
