"""A model behind an HTTP address, which is asked in JSON: ``"http://127.0.0.1:8080/predict"``.

It is asked ``POST {"inputs": [[0.5, null, ...], ...]}``, one entry an example, as it is shaped; null is a
value that is missing. It answers one of ``{"probabilities": [[0.9, 0.1], ...]}``, ``{"logits": [...]}`` and,
for numbers, ``{"numbers": [0.3, ...]}``, with one entry for each input, and may name its outputs beside that:
``"classes": ["benign", "malignant"]``.

The address is the model's owner's choice. No proxy is used, no redirection followed, and nothing of what
comes back is anything but numbers and names.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import math
import socket
import ssl
import threading
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import ArgumentError, PredictorError
from fedstill.core.user_functions import first_line

Floats = npt.NDArray[np.floating[Any]]

SCHEMES = ("http://", "https://")
SECONDS = 60.0  # that an answer may take, from the first byte asked to the last one read
MOST_BYTES = 2**26  # of an answer
MOST_VALUES = 2**18  # in a question: more inputs are several questions
GIVES = ("probabilities", "logits", "numbers")
PIECE = 2**16  # bytes read at once


class Endpoint:
    """A function of arrays ``(B, ...)`` that is computed elsewhere.

    Args:
        url: ``http://`` or ``https://``, where it answers.
        seconds: that an answer may take.

    Attributes:
        classes: names of its outputs, where it tells them; known once it has answered.
        probabilities: whether it gives those.

    Raises:
        ArgumentError: no such address, or one with a name and a password in it.
    """

    def __init__(self, url: str, seconds: float = SECONDS) -> None:
        allowed = "http://host:port/path, without name and password"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ArgumentError("address of the model", url, allowed) from error
        sound = parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url
        if not sound or parts.username is not None or parts.fragment:
            raise ArgumentError("address of the model", url, allowed)
        self._host, self._port, self._seconds = str(parts.hostname), port, seconds
        self._secure = parts.scheme == "https"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.called = f"endpoint {parts.scheme}://{parts.netloc}{parts.path}"
        self.classes: tuple[str, ...] = ()
        self.probabilities = False
        self._told: tuple[tuple[str, ...], str] | None = None

    @property
    def loopback(self) -> bool:
        """Whether it is on this machine."""
        try:
            return ipaddress.ip_address(self._host).is_loopback
        except ValueError:
            return self._host == "localhost"

    def __call__(self, x: Floats) -> Floats:
        """What it gives for inputs ``(B, ...)``.

        Raises:
            PredictorError: it cannot be reached, takes too long, or answers anything else.
        """
        rows = max(MOST_VALUES // max(math.prod(x.shape[1:]), 1), 1)
        parts = [self._ask(x[first : first + rows]) for first in range(0, len(x), rows)]
        return np.concatenate(parts) if parts else np.zeros((0, max(len(self.classes), 1)))

    def _ask(self, x: Floats) -> Floats:
        inputs = x.astype(object)
        if np.isnan(x).any():
            inputs[np.isnan(x)] = None  # JSON has no NaN
        body = json.dumps({"inputs": inputs.tolist()}).encode()
        try:
            read = self._sent(body)
        except (OSError, http.client.HTTPException) as error:
            raise self._wrong(f"cannot be asked: {first_line(error)}") from error
        try:
            answer = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"answers what is no JSON ({first_line(error)})") from error
        return self._read(answer, len(x))

    def _sent(self, body: bytes) -> bytes:
        """The bytes of an answer, all of which must be here in time."""
        late = TimeoutError(f"no whole answer after {self._seconds:g} seconds")
        link: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            link = http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=context)
        else:
            link = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        # http.client bounds each line of what comes before the answer, and not how long all of them take.
        over = threading.Event()
        watch = threading.Timer(self._seconds, lambda: _end(link, over))
        watch.daemon = True
        try:
            told = {"Content-Type": "application/json", "Accept": "application/json"}
            link.connect()
            watch.start()
            link.request("POST", self._path, body, told)
            answer, read = link.getresponse(), bytearray()
            if answer.status != http.client.OK:
                raise self._wrong(f"answers with status {answer.status}: allowed is 200")
            while piece := answer.read1(PIECE):
                read += piece
                if len(read) > MOST_BYTES:
                    raise self._wrong(f"answers more than {MOST_BYTES} bytes")
            if over.is_set():
                raise late
            return bytes(read)
        except (OSError, http.client.HTTPException) as error:
            if over.is_set():
                raise late from error
            raise
        finally:
            watch.cancel()
            link.close()

    def _read(self, answer: Any, rows: int) -> Floats:
        """The numbers in an answer, once it is what it should be."""
        given = [name for name in GIVES if isinstance(answer, dict) and name in answer]
        if len(given) != 1:
            raise self._wrong(f"answers none, or more than one, of {', '.join(GIVES)}")
        names = answer.get("classes", ())
        if not isinstance(names, list | tuple) or not all(isinstance(name, str | int) for name in names):
            raise self._wrong("answers classes that are no list of names")
        try:
            numbers = np.array(answer[given[0]])
        except ValueError as error:  # rows of different lengths
            raise self._wrong(f"answers {given[0]} that are no rows of numbers") from error
        if numbers.dtype.kind not in "iuf" or numbers.ndim not in (1, 2) or len(numbers) != rows:
            raise self._wrong(f"answers {given[0]} that are no {rows} rows of numbers")
        told = tuple(map(str, names)), given[0]
        if self._told not in (None, told):
            raise self._wrong("answers in another form than before")
        self._told, (self.classes, self.probabilities) = told, (told[0], told[1] == "probabilities")
        return numbers.astype(np.float64)

    def _wrong(self, what: str) -> PredictorError:
        return PredictorError(f"the {self.called} {what}")


def _end(link: http.client.HTTPConnection, over: threading.Event) -> None:
    """Whoever reads from a link reads its end, and finds why."""
    over.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(link.sock, socket.SHUT_RDWR)
