"""POST /open_session and /close_session."""
from fastapi import Request
from fastapi.responses import Response

from sglane.entrypoints.body import read_object
from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.responses import json_response
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.sessions import MAX_CAPACITY, MAX_ID_CHARACTERS, MAX_TIMEOUT_S
from sglane.entrypoints.validation import Fields


class SessionApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def open(self, request: Request) -> Response:
        """The new session's name, a JSON string."""
        fields = Fields(await read_object(request))
        sessions = self._server.engine_for_requests().sessions
        if fields.get("capacity_of_str_len") is None:
            raise bad_field("capacity_of_str_len", "is needed")
        fields.integer("capacity_of_str_len", 0, 0, MAX_CAPACITY)
        timeout_s = fields.number("timeout", 0.0, 0.0, MAX_TIMEOUT_S, above=True)
        return json_response(sessions.open(session_name(fields), fields.flag("streaming"), timeout_s))

    async def close(self, request: Request) -> Response:
        """Ends a session; its requests that run go on."""
        fields = Fields(await read_object(request))
        name = session_name(fields)
        if name is None:
            raise bad_field("session_id", "is needed")
        self._server.engine().sessions.close(name)
        return Response(status_code=200)


def session_name(fields: Fields) -> str | None:
    name = fields.string("session_id")
    if name is not None and not 0 < len(name) <= MAX_ID_CHARACTERS:
        raise bad_field("session_id", f"must have 1 to {MAX_ID_CHARACTERS} characters, has {len(name)}")
    return name
