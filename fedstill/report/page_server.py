"""Serves pages to browsers of this machine: read-only, under an address that nobody can guess.

Only loopback is listened on. An address without the token, which is made up at each start, is not found.
Requests under another name than this machine's own are refused: another site could have its name resolve to
this machine, and read what is served (DNS rebinding). A page is a function's word, never a file's.

Each connection has a deadline to send its request and to take its reply, and there is a limit on open
connections: any account of this machine can open as many as it likes, and send a byte now and then.
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
LEAST, MOST, SHARE = (
    2.0,
    30.0,
    0.05,
)  # seconds for which a page is kept, so that a share of time makes it anew
PAGES = 100  # that are kept
SECONDS = 10.0  # for a request to come, and again for its reply to be taken
CONNECTIONS = 16  # open at once
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
Page = Callable[[str, str], str | None]


class PageServer(ThreadingHTTPServer):
    """Serves a function's pages on loopback.

    Beyond :data:`CONNECTIONS` open connections, a new one takes the place of the oldest that still waits for
    its client; where all wait for pages, the new one is closed.

    Args:
        page: gives a page's HTML by the rest of its address (empty: the first page) and the nonce of its
            script; None: there is none.
        port: 0 is any that is free.
    """

    daemon_threads = True
    request_queue_size = 128  # that have not been taken yet
    allow_reuse_address = True

    def __init__(self, page: Page, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self._page, self._alone = page, threading.Lock()
        self._nonce = secrets.token_urlsafe(24)  # in pages that are kept; each reply has one of its own
        self._kept: dict[str, tuple[float, HTTPStatus, str]] = {}
        # Open connections, the oldest first, with the time by which the client has done its part; None: it
        # waits for its page.
        self._open: dict[Any, float | None] = {}
        self._watch = threading.RLock()

    @property
    def address(self) -> str:
        """Of the first page."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, within the limit on connections."""
        with self._watch:
            if len(self._open) >= CONNECTIONS:
                slow = [each for each, until in self._open.items() if until is not None]
                if not slow:
                    self.shutdown_request(request)
                    return
                self._end(slow[0])
            self._open[request] = time.monotonic() + SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections whose deadline has passed."""
        now = time.monotonic()
        with self._watch:
            for request in [each for each, until in self._open.items() if until is not None and until < now]:
                self._end(request)

    def set_deadline(self, request: Any, seconds: float | None) -> None:
        """Give an open connection so many seconds from now; None: as long as it takes here."""
        with self._watch:
            if request in self._open:
                self._open[request] = None if seconds is None else time.monotonic() + seconds

    def _end(self, request: Any) -> None:
        """Have the thread of a connection come to its end; it closes the connection itself."""
        del self._open[request]
        with suppress(OSError):  # the client has closed it already
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, which counts no longer."""
        with self._watch:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a page; a connection that was ended, here or by its client, is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def page(self, path: str, nonce: str) -> tuple[HTTPStatus, str]:
        """A page, made anew where it is due; one at a time."""
        with self._alone:
            until, status, html = self._kept.get(path, (0.0, HTTPStatus.OK, ""))
            start = time.monotonic()
            if start >= until:
                status, html = self._made(path)
                took = time.monotonic() - start
                if len(self._kept) >= PAGES:
                    self._kept.clear()
                self._kept[path] = time.monotonic() + min(max(LEAST, took / SHARE), MOST), status, html
        return status, html.replace(self._nonce, nonce)

    def _made(self, path: str) -> tuple[HTTPStatus, str]:
        try:
            html = self._page(path, self._nonce)
        except (FedstillError, OSError) as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, live_page.trouble(str(error), self._nonce)
        return (HTTPStatus.NOT_FOUND, "") if html is None else (HTTPStatus.OK, html)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "fedstill", ""
    timeout = SECONDS  # between two of its bytes; the server's deadline is for all of them

    def do_GET(self) -> None:
        """A page, or that there is none."""
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
        self.server.set_deadline(self.connection, SECONDS)
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

    def _refuse(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse
    _policy = "default-src 'none'; frame-ancestors 'none'"

    def end_headers(self) -> None:
        """With what keeps other sites and caches out, on every reply."""
        for name, value in {**HEADERS, "Content-Security-Policy": self._policy}.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a log would have the token."""
