"""Middleware of the dashboard: checks the token, and adds security headers to every response.

`dashboard/app.py` puts it in front of its routes. A browser sends the token once, in the address (`?token=...`), and
gets a cookie instead, so that the token is not kept in the history. Programs send it as `Authorization: Bearer`.
"""

from __future__ import annotations

import hashlib
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE = "sortedrl_dashboard"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class TokenMiddleware:
    """Passes on requests that have the token, or all requests if `token` is None."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self.app = app
        self.token = token
        # The cookie is a hash, so that a leaked cookie does not reveal the token.
        self.cookie = None if token is None else hashlib.sha256(f"dashboard {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(HTTPConnection(scope))
        await (self.app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """Return the response to a request without access, or None to pass the request on."""
        if self.token is None or self.cookie is None:
            return None
        given = request.query_params.get("token", "")
        if given and _is_same(given, self.token):
            answer = RedirectResponse(request.url.path or "/", status_code=303)
            answer.set_cookie(_COOKIE, self.cookie, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _is_same(bearer, self.token) or _is_same(request.cookies.get(_COOKIE, ""), self.cookie):
            return None
        return PlainTextResponse(
            "This dashboard needs a token: open its address with ?token=... once.\n", status_code=401
        )


def _is_same(given: str, wanted: str) -> bool:
    return secrets.compare_digest(given.encode(), wanted.encode())
