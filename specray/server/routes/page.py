"""The page at `/`: a chat that shows how speculation makes its tokens. Its files are in `specray/server/page`.

The files are the same for everyone and need no key. What the page shows comes from the API, which checks the key that
the page asks for.
"""

from pathlib import Path

from fastapi import FastAPI, Response

FOLDER = Path(__file__).parents[1] / "page"
JAVASCRIPT = "text/javascript"
FILES = {  # path -> name, media type
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", JAVASCRIPT),
    "/page/api.js": ("api.js", JAVASCRIPT),
    "/page/decoding.js": ("decoding.js", JAVASCRIPT),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(FILES)
HEADERS = {
    "content-security-policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # the browser refuses innerHTML and the like
            "trusted-types 'none'",
        ]
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_page_routes(app: FastAPI) -> None:
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (FOLDER / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def file() -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)
