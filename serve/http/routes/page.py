"""Serves the page for trying the models, and its files: those of `serve/page`, and the files that
it shares with the pages of reports and of `raybert inspect`.

The files are read once, at the start, so no other file can be reached, whatever the path.
"""

import mimetypes
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from serve.http.routes.base import errors_of

HEADERS = {
    # Everything comes from this server, the page has no inline script, and no page may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer server has other files at the same paths
}

SHARED = ("palette.css", "attention.css", "attention.js")


def page_routes() -> APIRouter:
    """Return the routes of the page, `GET /`, and of its files, `GET /page/…`."""
    router = APIRouter(tags=["front"])
    contents = dict(_contents(files("serve") / "page"))
    contents |= {name: (files("tracking") / name).read_bytes() for name in SHARED}

    def file_response(name: str) -> Response:
        return Response(contents[name], headers=HEADERS, media_type=_media_type(name))

    @router.get("/", response_class=HTMLResponse, responses=errors_of(None))
    async def show() -> Response:
        """A page for trying the models."""
        return file_response("index.html")

    @router.get("/page/{name:path}", include_in_schema=False)
    async def show_file(name: str) -> Response:
        """A file of the page."""
        if name not in contents:
            raise HTTPException(404)
        return file_response(name)

    return router


def _contents(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield all files below a folder, as path from there and content."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _contents(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.read_bytes()


def _media_type(name: str) -> str:
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return "text/javascript" if name.endswith(".js") else kind
