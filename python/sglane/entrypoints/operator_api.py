"""Verbs of an operator beside flush and abort: pause, profile, log. All behind the admin key."""
import logging
import tempfile
import time
from pathlib import Path

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from sglane.entrypoints.body import read_body
from sglane.entrypoints.errors import ApiError, bad_field
from sglane.entrypoints.responses import json_response
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.validation import UNSET, Fields, kind_of, parse_object, shown
from sglane.plan.io_struct import Reply

#: Seconds that a step under way gets to end before a pause is answered, and the ranks to begin a recording.
PATIENCE_S = 120.0
#: Seconds that the ranks get to write their recordings.
WRITE_PATIENCE_S = 600.0
MODES = ("abort", "retract", "in_place")
LEVELS = ("debug", "info", "warning", "error")
ACTIVITIES = ("CPU", "GPU")
MAX_STEPS = 1_000_000
MAX_PATH_CHARACTERS = 1024
#: What SGLang takes here and this server does not do: accepted where it asks for nothing.
NO_PROFILE = ("start_step", "profile_by_stage", "profile_stages", "merge_profiles", "shape_discovery")
NO_LOGGING = ("log_requests_format", "dump_requests_folder", "dump_requests_threshold", "crash_dump_folder", "dump_requests_exclude_meta_keys")


class OperatorApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def pause_generation(self, request: Request) -> Response:
        """No new steps; answered when none is under way. mode: abort, retract, in_place."""
        mode = (await read_fields(request)).string("mode", "abort")
        if mode not in MODES:
            raise bad_field("mode", f"must be one of {', '.join(MODES)}, got {shown(mode)!r}")
        await self._server.engine().client.pause(mode, PATIENCE_S)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        """End of a pause."""
        await read_fields(request)
        await self._server.engine().client.resume(PATIENCE_S)
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def start_profile(self, request: Request) -> Response:
        """Every rank records its steps; without num_steps until /stop_profile."""
        fields = await read_fields(request)
        refuse(fields, NO_PROFILE)
        folder = fields.string("output_dir") or tempfile.gettempdir()
        prefix = fields.string("profile_prefix") or ""
        for name, text in (("output_dir", folder), ("profile_prefix", prefix)):
            if len(text) > MAX_PATH_CHARACTERS or "\0" in text:
                raise bad_field(name, "is no name of a file")
        if "/" in prefix:
            raise bad_field("profile_prefix", "must not contain a /")
        num_steps = fields.integer("num_steps", 0, 1, MAX_STEPS) or None
        name = f"{prefix}-{time.time():.3f}".lstrip("-")
        reply = await self._server.engine().client.start_profile(
            str(Path(folder).absolute()), name, num_steps, activities_of(fields), fields.flag("with_stack"), fields.flag("record_shapes"), PATIENCE_S,
        )
        check(reply)
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(self, request: Request) -> Response:
        """Answered when every rank has written its file."""
        check(await self._server.engine().client.stop_profile(WRITE_PATIENCE_S))
        return PlainTextResponse("Stop profiling. The recordings are written.\n")

    async def configure_logging(self, request: Request) -> Response:
        """log_requests, log_requests_level, log_level; what is absent stays as it is."""
        fields = await read_fields(request)
        refuse(fields, NO_LOGGING)
        server = self._server
        client, log = server.engine().client, server.request_log
        log_requests = fields.flag("log_requests") if fields.get("log_requests") is not None else None
        detail = fields.integer("log_requests_level", -1, 0, 3)
        level = fields.string("log_level")
        if level is not None and level not in LEVELS:
            raise bad_field("log_level", f"must be one of {', '.join(LEVELS)}, got {shown(level)!r}")
        if detail >= 0:
            log.set_level(detail)
        if log_requests is not None:
            (server.tracker.add if log_requests else server.tracker.remove)(log)
        if level is not None:
            logging.getLogger().setLevel(level.upper())
            client.set_log_level(level)
        return Response(status_code=200)


async def read_fields(request: Request) -> Fields:
    """A JSON object, or nothing."""
    data = await read_body(request)
    return Fields(parse_object(data) if data else {})


def refuse(fields: Fields, names: tuple[str, ...]) -> None:
    for name in names:
        if fields.get(name) not in UNSET:
            raise bad_field(name, "is not supported")


def activities_of(fields: Fields) -> list[str]:
    """CPU and GPU unless given."""
    value = fields.get("activities")
    if value is None:
        return list(ACTIVITIES)
    if not isinstance(value, list):
        raise bad_field("activities", f"must be an array, not {kind_of(value)}")
    if not value or any(item not in ACTIVITIES for item in value):
        raise bad_field("activities", f"must be a list of {', '.join(ACTIVITIES)}, got {shown(value)}")
    return value


def check(reply: Reply) -> None:
    """Raises a 400 with what the ranks say."""
    if not reply.ok:
        raise ApiError(400, str(reply.payload["message"]))
