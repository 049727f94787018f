"""A page of a run in training: a server for this computer alone, whose page plays the current policies."""

from __future__ import annotations

import json
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from gpu_vecenv.train.plots import METRICS_FILE
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.web.page import shared_scalars, training_page
from gpu_vecenv.web.policies import policies_json

ADDRESS = "127.0.0.1"
SHARE = 0.01  # of the time of training, at most, for copies of the policies
TIMEOUT_SECONDS = 5.0  # for a request
MAX_BYTES = 1 << 20  # of metrics in a response
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class TrainingServer:
    """Serves the page of a trainer's game on 127.0.0.1, at a port that the system chooses; a context manager.

    The page plays the game in the browser, asks for newer policies and draws the rows of ``metrics.csv``. Numbers that
    all environments share, which a curriculum may change, are those of training from the page's next episode on.
    Requests are answered by threads of their own, from copies: policies are copied by ``update``, which the training
    thread calls between iterations, only if a page asked for them, and for at most a hundredth of the time. Who does
    not have the token in the URL, or asks for another host, is refused.

    Attributes:
        url: Of the page, with the token.

    Args:
        trainer: Whose policies play; of populations the first members.
        folder: Its run folder.

    Raises:
        ConfigError, EnvDefinitionError, DeviceUnavailableError, CompilerError, SourceRuleError, KernelCompileError: As
            ``game_page``.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._metrics = trainer, folder / METRICS_FILE
        self._policies = [trainer.policies[name] for name in trainer.acting_members()]
        self._page = training_page(trainer.env.game, self._policies)
        self._wanted, self._has_rows = threading.Event(), False
        self._next_copy = 0.0
        self._copied = self._copy("training")
        self._token = secrets.token_urlsafe(16)
        self._server = _Server(self._answer)
        self._hosts = {f"{name}:{self._server.server_port}" for name in (ADDRESS, "localhost")}
        self.url = f"http://{ADDRESS}:{self._server.server_port}/{self._token}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="training page", daemon=True)

    def __enter__(self) -> TrainingServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def update(self) -> None:
        """After each row of metrics: copy the policies, if a page asked for newer ones."""
        self._has_rows = True
        start = time.perf_counter()
        if self._wanted.is_set() and start >= self._next_copy:
            self._wanted.clear()
            self._copied = self._copy("training")
            end = time.perf_counter()
            self._next_copy = end + (end - start) / SHARE

    def finish(self) -> None:
        """After the last iteration: copy the final policies."""
        self._copied = self._copy("ended")

    def _copy(self, phase: str) -> tuple[int, str, bytes]:
        """The iteration, whether training has ended, and both with shared numbers and the policies in JSON."""
        trainer, state = self._trainer, self._trainer.env.state
        progress = {"iteration": trainer.iteration, "num_iterations": trainer.num_iterations, "phase": phase}
        scalars = {name: state[name].item() for name in shared_scalars(trainer.env.game)}
        content = {**progress, "scalars": scalars, "policies": policies_json(self._policies)}
        return trainer.iteration, phase, json.dumps(content, separators=(",", ":")).encode()

    def _answer(self, host: str | None, target: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, type and content for a request."""
        url = urllib.parse.urlsplit(target)
        token, _, name = url.path.removeprefix("/").partition("/")
        if host not in self._hosts or not secrets.compare_digest(token.encode(), self._token.encode()):
            return HTTPStatus.FORBIDDEN, "text/plain", b"expected the URL that gpu-vecenv train --watch printed\n"
        query = dict(urllib.parse.parse_qsl(url.query))
        if name == "":
            return HTTPStatus.OK, "text/html; charset=utf-8", self._page
        if name == "policies":
            return self._newer_policies(query.get("after", ""))
        if name == "metrics" and query.get("start", "").isascii() and query.get("start", "").isdigit():
            return HTTPStatus.OK, "text/csv; charset=utf-8", self._rows(int(query["start"]))
        return HTTPStatus.NOT_FOUND, "text/plain", b"not found\n"

    def _newer_policies(self, known: str) -> tuple[HTTPStatus, str, bytes]:
        """The policies, unless these are the known ones; then newer ones are copied at the next row of metrics."""
        iteration, phase, content = self._copied
        if phase == "training":
            self._wanted.set()
        if known == f"{iteration}-{phase}":
            return HTTPStatus.NO_CONTENT, "application/json", b""
        return HTTPStatus.OK, "application/json", content

    def _rows(self, start: int) -> bytes:
        """Whole lines of ``metrics.csv`` from a byte on; none before its first row in this process."""
        if not self._has_rows:
            return b""
        with self._metrics.open("rb") as file:
            file.seek(start)
            content = file.read(MAX_BYTES)
        return content[: content.rfind(b"\n") + 1]


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, answer: Callable[[str | None, str], tuple[HTTPStatus, str, bytes]]) -> None:
        super().__init__((ADDRESS, 0), _Handler)
        self.answer = answer

    def handle_error(self, request: object, client_address: object) -> None:
        """Pages may close a connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        status, kind, content = self.server.answer(self.headers.get("Host"), self.path)
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "gpu_vecenv"

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the terminal has the progress of training."""
