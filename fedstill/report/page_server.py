"""Read-only web server for browsers on this machine, at a secret address.

It listens on loopback only. URLs must contain a random token that is new at each start. Requests with another
host name are refused, because another site could resolve its name to this machine and read the pages (DNS
rebinding). Pages come from a function; files are never served.

Each connection has a deadline for its request and for its reply, and the number of connections is limited,
because any local account can open connections and send single bytes.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from fedstill.core.errors import FedstillError
from fedstill.report import live_page

HOSTS = ("127.0.0.1", "localhost")
# A page is cached for its rendering time / RENDER_SHARE seconds, within these limits.
MIN_CACHE_SECONDS, MAX_CACHE_SECONDS, RENDER_SHARE = 2.0, 30.0, 0.05
MAX_CACHED_PAGES = 100
CLIENT_TIMEOUT = 10.0  # seconds for a client to send its request, and to receive its reply
MAX_CONNECTIONS = 16
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; script-src "
)
RenderPage = Callable[[str, str], str | None]


class PageServer(ThreadingHTTPServer):
    """Server of a function's pages on loopback.

    Beyond :data:`MAX_CONNECTIONS`, a new connection replaces the oldest one that waits for its client. If all
    wait for pages, the new connection is closed.

    Args:
        render_page: function from the URL path after the token (empty for the first page) and the nonce of
            the page's script to HTML; None if there is no such page.
        port: TCP port; 0 for any free port.
    """

    daemon_threads = True
    request_queue_size = 128  # connections not yet accepted
    allow_reuse_address = True

    def __init__(self, render_page: RenderPage, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self._render_page, self._render_lock = render_page, threading.Lock()
        self._cached_nonce = secrets.token_urlsafe(24)  # placeholder in cached pages; each reply has its own
        self._cache: dict[str, tuple[float, HTTPStatus, str]] = {}
        # Open connections, oldest first, with the client's deadline; None while the page is rendered.
        self._deadlines: dict[Any, float | None] = {}
        self._deadlines_lock = threading.RLock()

    @property
    def address(self) -> str:
        """URL of the first page."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread, within the limit on connections."""
        with self._deadlines_lock:
            if len(self._deadlines) >= MAX_CONNECTIONS:
                slow = [waiting for waiting, deadline in self._deadlines.items() if deadline is not None]
                if not slow:
                    self.shutdown_request(request)
                    return
                self._end(slow[0])
            self._deadlines[request] = time.monotonic() + CLIENT_TIMEOUT
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections whose deadline has passed."""
        now = time.monotonic()
        with self._deadlines_lock:
            expired = [
                request
                for request, deadline in self._deadlines.items()
                if deadline is not None and deadline < now
            ]
            for request in expired:
                self._end(request)

    def set_deadline(self, request: Any, seconds: float | None) -> None:
        """Set the deadline of an open connection to ``seconds`` from now; None for no deadline."""
        with self._deadlines_lock:
            if request in self._deadlines:
                self._deadlines[request] = None if seconds is None else time.monotonic() + seconds

    def _end(self, request: Any) -> None:
        """Shut a connection down, so that its thread ends and closes it."""
        del self._deadlines[request]
        with suppress(OSError):  # already closed by the client
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and stop counting it."""
        with self._deadlines_lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a page; closed connections are not errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def page(self, path: str, nonce: str) -> tuple[HTTPStatus, str]:
        """Return status and HTML of a page from the cache, or rendered; one page is rendered at a time."""
        with self._render_lock:
            expires, status, html = self._cache.get(path, (0.0, HTTPStatus.OK, ""))
            start = time.monotonic()
            if start >= expires:
                status, html = self._render(path)
                seconds = time.monotonic() - start
                if len(self._cache) >= MAX_CACHED_PAGES:
                    self._cache.clear()
                lifetime = min(max(MIN_CACHE_SECONDS, seconds / RENDER_SHARE), MAX_CACHE_SECONDS)
                self._cache[path] = time.monotonic() + lifetime, status, html
        return status, html.replace(self._cached_nonce, nonce)

    def _render(self, path: str) -> tuple[HTTPStatus, str]:
        try:
            html = self._render_page(path, self._cached_nonce)
        except (FedstillError, OSError) as error:
            page = live_page.render_error_page(str(error), self._cached_nonce)
            return HTTPStatus.INTERNAL_SERVER_ERROR, page
        return (HTTPStatus.NOT_FOUND, "") if html is None else (HTTPStatus.OK, html)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "fedstill", ""
    timeout = CLIENT_TIMEOUT  # between two bytes; the server's deadline is for the whole request

    def do_GET(self) -> None:
        """Send a page, or an error status."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in HOSTS:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        _, _, rest = urlsplit(self.path).path.partition("/")
        token, slash, path = rest.partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()) or not slash:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        nonce = secrets.token_urlsafe(18)
        self.server.set_deadline(self.connection, None)
        status, html = self.server.page(unquote(path), nonce)
        self.server.set_deadline(self.connection, CLIENT_TIMEOUT)
        if not html:
            self.send_error(status)
            return
        content = html.encode("utf-8", "replace")
        self._policy = f"{POLICY}'nonce-{nonce}'"
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse_method(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method
    _policy = "default-src 'none'; frame-ancestors 'none'"

    def end_headers(self) -> None:
        """Add headers against other sites and caches to every reply."""
        for name, value in {**HEADERS, "Content-Security-Policy": self._policy}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, because their URLs contain the token."""
