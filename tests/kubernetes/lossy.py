"""A proxy in front of the API server that loses answers: the request is carried out, and whoever
made it never hears of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import urllib3
import yaml

NOT_PASSED_ON = {"host", "connection", "transfer-encoding", "content-length"}


@contextmanager
def lossy(kubeconfig: Path, *loses: str) -> Iterator[tuple[Path, Counter[str]]]:
    """A kubeconfig of the proxy, and how many objects of each kind were asked to be made through
    it. The first answer to a POST of each kind in `loses` (`jobs`, `secrets`) is lost."""
    tree = yaml.safe_load(kubeconfig.read_text())
    there = tree["clusters"][0]["cluster"]
    pool = urllib3.PoolManager(ca_certs=there.pop("certificate-authority"), maxsize=32)
    url, made = there["server"], Counter[str]()

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in NOT_PASSED_ON}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = pool.request(
                self.command, url + self.path, headers=headers, body=body, preload_content=False
            )
            kind = self.path.partition("?")[0].rpartition("/")[2]
            real = self.command == "POST" and "dryRun" not in self.path
            made[kind] += real
            if real and kind in loses and made[kind] == 1:
                answer.drain_conn()
                self.connection.close()
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in NOT_PASSED_ON:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            for part in answer.stream(1 << 16):
                self.wfile.write(part)
                self.wfile.flush()

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = pass_on  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there["server"] = f"http://127.0.0.1:{server.server_address[1]}"
    path = kubeconfig.with_name("lossy.kubeconfig")
    path.write_text(yaml.safe_dump(tree))
    try:
        yield path, made
    finally:
        server.shutdown()
        server.server_close()
