"""Real HTTP servers on loopback whose answers a test decides."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Status, content and headers. Text is sent as it is, an iterator of bytes without a length,
# anything else as JSON.
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server with this handler, which runs until the block ends and logs
    nothing.
    """
    handler.log_message = lambda *_: None  # type: ignore[method-assign]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def post_server(answer: Callable[[str, dict[str, Any], dict[str, str]], Answer]) -> Iterator[str]:
    """Yield the address of a server that answers POST requests of JSON by
    ``answer(path, body, headers)``.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content, *more = answer(self.path, body, dict(self.headers))
            self.send_response(status)
            if isinstance(content, Iterator):
                self.end_headers()
                self.wfile.writelines(content)
                return
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            for name, value in (
                {"Content-Length": str(len(data))} | (more[0] if more else {})
            ).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def handle(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                super().handle()

    with serving(Handler) as address:
        yield address
