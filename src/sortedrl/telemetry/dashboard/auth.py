"""Who may ask the dashboard, and what its pages may do: the token, and headers on every answer.

`dashboard/app.py` puts it in front of its routes. A browser shows the token once, in the address (`?token=...`), and
gets a cookie in its place, so that it stays in no history; programs send it as `Authorization: Bearer`.
"""

from __future__ import annotations

import hashlib
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "sortedrl_dashboard"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Gate:
    """Lets requests with the token through, or all where there is none."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self.app = app
        self.token = token
        # A cookie that gets out is not the token itself.
        self.pass_word = None if token is None else hashlib.sha256(f"dashboard {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(HTTPConnection(scope))
        await (self.app if refusal is None else refusal)(scope, receive, send_marked)

    def _refusal(self, asked: HTTPConnection) -> Response | None:
        """None: let it through."""
        if self.token is None or self.pass_word is None:
            return None
        shown = asked.query_params.get("token", "")
        if shown and _is_same(shown, self.token):
            answer = RedirectResponse(asked.url.path or "/", status_code=303)
            answer.set_cookie(COOKIE, self.pass_word, httponly=True, samesite="strict")
            return answer
        bearer = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if _is_same(bearer, self.token) or _is_same(asked.cookies.get(COOKIE, ""), self.pass_word):
            return None
        return PlainTextResponse(
            "This dashboard wants its token: open its address with ?token=... once.\n", status_code=401
        )


def _is_same(given: str, wanted: str) -> bool:
    return secrets.compare_digest(given.encode(), wanted.encode())
