"""What the real HTTP servers of reward tests share: they keep what they were asked, and how many asked at once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Recording(ThreadingHTTPServer):
    """A server on loopback."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self.lock = threading.Lock()
        self.running = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    """Notes what is asked of its server, and replies."""

    server: Recording

    def log_message(self, *_) -> None:
        """A request is no news."""

    def noted(self) -> dict:
        """What was asked, once the server knows it."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(asked)
            self.server.paths.append(self.path)
        return asked

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
