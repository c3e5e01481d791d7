"""GET / and /page/...: a page that shows the server at work and talks to the model. Plain files; everything it shows comes from other routes."""
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

FOLDER = Path(__file__).parent / "page"
#: path -> (file, media type). Open to everybody: there is nothing of this server in them.
FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in ("api", "chart", "chat", "engine", "main")},
}
#: Nothing but these files and this server; nobody may frame the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
                               "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageApi:
    def __init__(self) -> None:
        self._answers = {path: ((FOLDER / name).read_bytes(), media) for path, (name, media) in FILES.items()}

    async def file(self, request: Request) -> Response:
        """One of FILES. Needs no engine, so the page can say that the server is starting."""
        body, media = self._answers[request.url.path]
        return Response(body, media_type=media, headers=HEADERS)
