"""A real HTTP server for reward tests, which replies as it is told to."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, str] | None
"""A status and a body; of a redirect, where it leads. None hangs up."""


class Server(ThreadingHTTPServer):
    """A server on loopback. It keeps what it was asked, and how many asked at once.

    Args:
        answer: gives the reply to a request, once `replies` are used up.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[dict], Reply], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.replies: list[Reply] = []
        self.may_reply = threading.Event()
        self.may_reply.set()
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.card: dict = {}
        """Reply to each GET."""
        self.lock = threading.Lock()
        self.running = self.most = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_) -> None:
        self.may_reply.set()
        self.stop()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_) -> None:
        """A request is no news."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.card).encode())

    def do_HEAD(self) -> None:
        self.server.paths.append(self.path)
        self.send_response((self.server.answer({}) or (0,))[0])
        self.end_headers()

    def do_POST(self) -> None:
        server, asked = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(asked)
            server.paths.append(self.path)
            server.keys.append(self.headers["Authorization"])
            server.running += 1
            server.most = max(server.most, server.running)
            is_told = bool(server.replies)
            reply = server.replies.pop(0) if is_told else None
        server.may_reply.wait(30)
        reply = reply if is_told else server.answer(asked)
        with server.lock:
            server.running -= 1
        if reply is not None:
            self.send_response(reply[0])
            if 300 <= reply[0] < 400:
                self.send_header("Location", reply[1])
            self.end_headers()
            self.wfile.write(reply[1].encode(errors="surrogateescape"))
