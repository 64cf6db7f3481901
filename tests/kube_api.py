"""An API server in memory for fast tests: what a run asks of Jobs, pods and Secrets, and an outage.
A Job that is made has at once a pod that runs; `end` ends both. The real one is in
tests/kubernetes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]


class KubeApi(ThreadingHTTPServer):
    """While it is `away` it closes every connection without a word; with `status` it answers with
    that. `looks` counts the Jobs that it was asked to look at only (dry runs)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.news = threading.Condition()
        self.kinds: dict[str, dict[str, Object]] = {"jobs": {}, "pods": {}, "secrets": {}}
        self.events: list[tuple[str, str, Object]] = []  # kind, type, object; number: its version
        self.away, self.status, self.looks = False, 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kubeconfig(self, path: Path) -> Path:
        told = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [
                {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
            ],
            "users": [{"name": "me", "user": {}}],
        }
        path.write_text(json.dumps(told))
        return path

    def put(self, kind: str, thing: Object, type: str = "MODIFIED") -> Object:
        """Stores or deletes an object and tells who watches."""
        with self.news:
            name = thing["metadata"]["name"]
            version = str(len(self.events) + 1)
            thing = {**thing, "metadata": {**thing["metadata"], "resourceVersion": version}}
            self.kinds[kind].pop(name, None)
            if type != "DELETED":
                self.kinds[kind][name] = thing
            self.events.append((kind, type, thing))
            self.news.notify_all()
            return thing

    def go_away(self) -> None:
        """From here on nobody is answered, and watches break."""
        with self.news:
            self.away = True
            self.news.notify_all()

    def make(self, job: Object) -> Object:
        name = job["metadata"]["name"]
        metadata = {**job["metadata"], "uid": f"uid-of-{name}"}
        pod = job["spec"]["template"]
        labels = {**pod.get("metadata", {}).get("labels", {}), "job-name": name}
        running = [{"name": pod["spec"]["containers"][0]["name"], "state": {"running": {}}}]
        self.put(
            "pods",
            {
                "metadata": {"name": f"{name}-pod", "uid": f"pod-of-{name}", "labels": labels},
                "spec": pod["spec"],
                "status": {"phase": "Running", "containerStatuses": running},
            },
        )
        return self.put("jobs", {**job, "metadata": metadata, "status": {}})

    def end(self, name: str) -> None:
        """The harness of this Job ends with status 0."""
        message = json.dumps({"ended_by": "exit", "status": 0, "error": "", "seconds": 1})
        pod = self.kinds["pods"][f"{name}-pod"]
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}
        statuses = [{**pod["status"]["containerStatuses"][0], "state": ended}]
        self.put("pods", {**pod, "status": {"phase": "Succeeded", "containerStatuses": statuses}})
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.put("jobs", {**self.kinds["jobs"][name], "status": done})

    def delete(self, name: str) -> None:
        for kind, own in (("jobs", name), ("pods", f"{name}-pod")):
            if own in self.kinds[kind]:
                self.put(kind, self.kinds[kind][own], "DELETED")


class _Handler(BaseHTTPRequestHandler):
    server: KubeApi
    protocol_version = "HTTP/1.1"  # whose chunks are read as they come

    def do_GET(self) -> None:
        if self._refuses():
            return
        kind, name, query = self._asked()
        if name:
            found = self.server.kinds[kind].get(name)
            self._answer(200 if found and not self.path.endswith("/log") else 404, found or {})
        elif "watch" in query:
            self._watch(kind, query)
        else:
            with self.server.news:
                version = str(len(self.server.events))
                items = [o for o in self.server.kinds[kind].values() if _has(o, query)]
            self._answer(200, {"metadata": {"resourceVersion": version}, "items": items})

    def do_POST(self) -> None:
        if self._refuses():
            return
        body = self._body()
        kind, _, query = self._asked()
        if kind == "selfsubjectaccessreviews":
            body["status"] = {"allowed": True}
        elif "dryRun" in query:
            self.server.looks += 1
        elif body["metadata"]["name"] in self.server.kinds[kind]:
            self._answer(409, {})
            return
        else:
            body = self.server.make(body) if kind == "jobs" else self.server.put(kind, body)
        self._answer(201, body)

    def do_DELETE(self) -> None:
        if self._refuses():
            return
        self._body()
        _, name, _ = self._asked()
        self.server.delete(name.removesuffix("-pod"))
        self._answer(200, {})

    def _refuses(self) -> bool:
        if self.server.status:
            self._answer(self.server.status, {})
        self.close_connection = True
        return self.server.away or bool(self.server.status)

    def _asked(self) -> tuple[str, str, dict[str, list[str]]]:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        kind = next(p for p in parts if p in (*self.server.kinds, "selfsubjectaccessreviews"))
        name = parts[parts.index(kind) + 1 :]
        return kind, name[0] if name else "", parse_qs(url.query)

    def _body(self) -> Object:
        body: Object = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}")
        return body

    def _answer(self, status: int, body: Object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _watch(self, kind: str, query: dict[str, list[str]]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        told = int(query["resourceVersion"][0])
        while not self.server.away:
            with self.server.news:
                if told == len(self.server.events):
                    self.server.news.wait(5)
                fresh = self.server.events[told:]
                told += len(fresh)
            for of, type, thing in fresh:
                if of == kind and _has(thing, query):
                    line = json.dumps({"type": type, "object": thing}) + "\n"
                    self.wfile.write(f"{len(line):x}\r\n{line}\r\n".encode())

    def log_message(self, *_: object) -> None:
        pass


def _has(thing: Object, query: dict[str, list[str]]) -> bool:
    labels = thing["metadata"].get("labels") or {}
    wanted = filter(None, query.get("labelSelector", [""])[0].split(","))
    return all(labels.get(name) == value for name, value in (w.split("=") for w in wanted))
