"""GET /metrics: what the front has counted, and the planner's figures at the time of the scrape."""
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from sglane.entrypoints.errors import ApiError
from sglane.entrypoints.server_state import ServerState
from sglane.observability.metrics import CONTENT_TYPE, Metrics

#: Seconds that the planner gets to answer; a scrape must not hang where the engine does.
PATIENCE_S = 3.0


class MetricsApi:
    def __init__(self, server: ServerState, metrics: Metrics):
        self._server = server
        self._metrics = metrics

    async def scrape(self, request: Request) -> Response:
        """Prometheus text. While the engine starts, hangs or has ended, only the front's own figures are there."""
        return Response(self._metrics.as_text(await self._planner_state()), headers={"Content-Type": CONTENT_TYPE})

    async def _planner_state(self) -> dict[str, Any] | None:
        try:
            return await self._server.engine().client.get_state(PATIENCE_S)
        except ApiError:  # there is no engine; /health says why
            return None
