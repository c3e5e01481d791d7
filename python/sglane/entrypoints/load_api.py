"""GET /v1/loads and /get_load: how busy the engine is, for routers and dashboards. Figures come from the planner at the time of the question."""
import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

import sglane
from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.meta_info import mean_accepted
from sglane.entrypoints.responses import json_response
from sglane.entrypoints.server_state import ServerState

#: Seconds that the planner gets to answer.
PATIENCE_S = 20.0
#: Sections of an answer; `core` is always there. Of the others, those that have no figures here are empty.
SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "totals")
NO_SECTION = "must be a list of " + ", ".join(SECTIONS) + " or all"


class LoadApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def get_load(self, request: Request) -> Response:
        """The short form: one object per data-parallel rank, of which there is one."""
        state = await self._state()
        num_waiting = state["num_waiting_reqs"]
        num_tokens = state["num_used_tokens"] + state["num_waiting_uncached_tokens"]
        return json_response([{"dp_rank": 0, "num_reqs": state["num_running_reqs"] + num_waiting, "num_waiting_reqs": num_waiting,
                               "num_tokens": num_tokens}])

    async def loads(self, request: Request) -> Response:
        """`include`: sections, comma-separated. `format`: json, or prometheus for gauges as text."""
        query = request.query_params
        sections = read_sections(query.get("include"))
        layout = query.get("format") or "json"
        if layout not in ("json", "prometheus"):
            raise bad_field("format", f"must be json or prometheus, got {layout[:40]!r}")
        if (query.get("dp_rank") or "0") != "0":
            raise bad_field("dp_rank", "must be 0: there is one data-parallel rank")
        state = await self._state()
        load = load_of(state, sections)
        if layout == "prometheus":
            return PlainTextResponse(as_text(load, self._server.model_name))
        args = self._server.args
        return json_response({"timestamp": time.time(), "version": sglane.__version__, "accelerator": args.device, "num_accelerators": args.cp_size,
                              "loads": [load]})

    async def _state(self) -> dict[str, Any]:
        return await self._server.engine().client.get_state(PATIENCE_S)


def read_sections(text: str | None) -> frozenset[str]:
    names = frozenset((text or "core").split(","))
    if "all" in names:
        return frozenset(SECTIONS)
    if not names <= frozenset(SECTIONS):
        raise bad_field("include", NO_SECTION)
    return names


def load_of(state: Mapping[str, Any], sections: frozenset[str]) -> dict[str, Any]:
    """The planner's state in the words of this route. Tokens, but for the lanes' pages."""
    totals = state["totals"]
    num_read = totals["num_prompt_tokens"] + totals["num_cached_tokens"]
    num_slots = state["effective_max_running_requests_per_dp"]
    load: dict[str, Any] = {
        "dp_rank": 0,
        "num_running_reqs": state["num_running_reqs"],
        "num_waiting_reqs": state["num_waiting_reqs"],
        "num_total_reqs": state["num_running_reqs"] + state["num_waiting_reqs"],
        "num_waiting_uncached_tokens": state["num_waiting_uncached_tokens"],
        "num_used_tokens": state["num_used_tokens"],
        "num_total_tokens": state["num_used_tokens"] + state["num_waiting_uncached_tokens"],
        "max_total_num_tokens": state["max_total_num_tokens"],
        "max_running_requests": num_slots,
        "token_usage": state["token_usage"],
        "gen_throughput": state["last_gen_throughput"],
        "cache_hit_rate": totals["num_cached_tokens"] / num_read if num_read else 0.0,  # since the start, not of the last batch
        "utilization": state["num_running_reqs"] / num_slots,
    }
    if "memory" in sections:
        ledger = state["kv_ledger"]
        load["memory"] = {**state["memory_usage"], "page_size": ledger["page_size"], "lanes": ledger["device"], "host_lanes": ledger["host"],
                          "lane_work": state["lanes"], "host_cache": state["host_cache"], "sessions": state["sessions"]}
    if "queues" in sections:
        load["queues"] = {"waiting": state["num_waiting_reqs"], "retracted": totals["num_retractions"]}
    if "totals" in sections:  # since the start; prompt tokens are those that were computed
        load["totals"] = {name.removeprefix("num_"): count for name, count in totals.items()}
    if "spec" in sections:
        load["spec"] = spec_of(state.get("speculation"))
    for name in ("lora", "disagg"):
        if name in sections:
            load[name] = None
    return load


def spec_of(speculation: Mapping[str, Any] | None) -> dict[str, float | None] | None:
    """Tokens per verify step and accepted shares of drafts since the start. None: the server does not speculate."""
    if speculation is None:
        return None
    num_drafts = speculation["num_drafts"]
    return {"accept_length": mean_accepted(speculation), "accept_rate": speculation["num_accepted"] / num_drafts if num_drafts else None}


def as_text(load: Mapping[str, Any], model_name: str) -> str:
    """The numbers of `load` as gauges in Prometheus' text format."""
    name = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for key, value in load.items():
        if key != "dp_rank" and isinstance(value, int | float):
            lines += [f"# TYPE sglang:{key} gauge", f'sglang:{key}{{model_name="{name}",dp_rank="0"}} {value}']
    return "\n".join(lines) + "\n"
