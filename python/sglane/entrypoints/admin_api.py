"""Health, information, and the verbs of an operator: flush, abort."""
import asyncio
import math
import uuid
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

import sglane
from sglane.entrypoints.body import read_body
from sglane.entrypoints.errors import ApiError, bad_field
from sglane.entrypoints.generation import LogprobWish
from sglane.entrypoints.meta_info import mean_accepted
from sglane.entrypoints.request_builder import Prompt
from sglane.entrypoints.responses import json_response
from sglane.entrypoints.sampling import Sampling, TextParams
from sglane.entrypoints.server_state import Phase, ServerState
from sglane.entrypoints.validation import Fields, check_rid, parse_object
from sglane.plan.io_struct import SamplingParams

#: Seconds that the planner gets to answer a question.
PATIENCE_S = 20.0
MAX_FLUSH_TIMEOUT_S = 3600.0
PROBE_PRIORITY = (1 << 31) - 1
FLUSHED = "Cache flushed.\n"


class AdminApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def ping(self, request: Request) -> Response:
        """The HTTP server runs."""
        return Response(status_code=200)

    async def health(self, request: Request) -> Response:
        """200: ready, and the engine's loop turns (busy or not)."""
        self._server.check_health()
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """200: new requests are taken."""
        self._server.engine_for_requests()
        self._server.check_health()
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """200 as soon as the engine has produced anything for anybody; asks for one token to make sure that there is something to do."""
        self._server.check_health()
        engine = self._server.engine()
        if engine.client.is_paused:
            return Response(status_code=200)  # on purpose it produces nothing; its loop turns
        job = engine.client.open_job([f"HEALTH_CHECK_{uuid.uuid4().hex}"], is_probe=True)
        sampling = Sampling(SamplingParams(max_new_tokens=1, temperature=0.0), TextParams(), 1, 1, 0)
        prompt = Prompt(job.names[0], np.zeros(1, np.int32), sampling, LogprobWish(), "health", PROBE_PRIORITY, "input_ids")
        produced = engine.client.next_output()
        try:
            engine.builder.submit(job, [prompt], wants_updates=False)
            await asyncio.wait_for(produced, self._server.args.health_timeout_s)
        except TimeoutError as error:
            raise ApiError(503, f"the engine produced nothing for {self._server.args.health_timeout_s:g} s") from error
        finally:
            job.close()
        return Response(status_code=200)

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        server = self._server
        return json_response({
            "model_path": server.config.source.path,
            "served_model_name": server.model_name,
            "tokenizer_path": server.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": server.config.source.kind,
            "reasoning_parser": server.args.reasoning_parser,
            "tool_call_parser": server.args.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": server.config.model_type,
            "architectures": list(server.config.architectures),
        })

    async def server_info(self, request: Request) -> Response:
        """All flags, and the planner's state."""
        server = self._server
        engine = server.engine()
        state = await engine.client.get_state(PATIENCE_S)
        args = server.flat_args()
        parallel = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "disaggregation_mode": "null", "load_balance_method": "round_robin"}
        return json_response({
            **args,
            **parallel,
            **engine.info.info,
            "context_length": engine.info.context_length,
            "max_req_input_len": engine.info.max_request_tokens - 1,
            "max_total_num_tokens": engine.info.max_total_tokens,
            "status": server.phase.value,
            "version": sglane.__version__,
            "launch_command": server.launch_command,
            "startup_time": server.startup_s,
            "frontend": "python",
            "kv_events": None,
            "internal_states": [{**args, **parallel, "avg_spec_accept_length": mean_accepted(state.get("speculation")), **state}],
        })

    async def flush_cache(self, request: Request) -> Response:
        """Drop the prefix cache; waits up to `timeout` seconds for an idle engine. 400 if it stays busy."""
        timeout_s = read_timeout(request.query_params.get("timeout"))
        reply = await self._server.engine().client.flush_cache(timeout_s, PATIENCE_S)
        if not reply.ok:
            raise ApiError(400, f"the cache was not flushed: {reply.payload.get('message', 'the engine is busy')}")
        return PlainTextResponse(FLUSHED)

    async def abort_request(self, request: Request) -> Response:
        """End a request by its rid, or all. Unknown rids are ignored."""
        data = await read_body(request)
        fields = Fields(parse_object(data) if data else {})
        client = self._server.engine().client
        rid = fields.get("rid")
        if fields.flag("abort_all"):
            client.abort_all()
        else:
            for name in [check_rid(name) for name in (rid if isinstance(rid, list) else [rid])]:  # all are checked before one is ended
                client.abort(name)
        return Response(status_code=200)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._server.model_name:
            raise ApiError(404, f"the model {name!r} does not exist; this server has {self._server.model_name!r}", "model")
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        server = self._server
        if server.phase is Phase.STARTING:
            raise ApiError(503, server.why_not())
        return {
            "id": server.model_name, "object": "model", "created": int(server.started_at), "owned_by": "sglane", "root": server.config.source.path,
            "parent": None, "max_model_len": server.engine().info.context_length,
        }


def read_timeout(text: str | None) -> float:
    """Seconds, from a query parameter."""
    if text is None or text == "":
        return 0.0
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0.0 <= timeout_s <= MAX_FLUSH_TIMEOUT_S:
        raise bad_field("timeout", f"must be a number of seconds in [0, {MAX_FLUSH_TIMEOUT_S:g}], got {text[:40]!r}")
    return timeout_s
