"""A proxy on loopback that counts the requests to an HTTP server."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass
class RequestCounter:
    """How often each method and path was requested at ``url``; queries and ids after the path are left out."""

    url: str = ""
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many requests there were in all."""
        return self.requests.total()


@contextmanager
def counted_requests(target: str) -> Iterator[RequestCounter]:
    """Forward requests to the server at ``target``; the counter names the address that counts."""
    counter, host = RequestCounter(), urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            counter.requests[f"{self.command} {urlsplit(self.path).path}"] += 1
            body = self._body()
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            connection = http.client.HTTPConnection(host, timeout=120)
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in HOP_BY_HOP:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    counter.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield counter
    finally:
        server.shutdown()
        server.server_close()
