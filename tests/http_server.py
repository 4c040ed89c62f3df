# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on this machine whose answers a test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonServer:
    """Answers a POST with what ``answer`` makes of its body: a JSON object, or an HTTP status. Use it in a ``with``."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any] | int]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append({"path": self.path, **body})
                server.keys.append(self.headers.get("Authorization"))
                said = server.answer(body)
                status, content = (said, {"error": "no"}) if isinstance(said, int) else (200, said)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> JsonServer:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
