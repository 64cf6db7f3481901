"""The Kubernetes API as this project uses it: lists, watches, and a few writes. Blocking.

`Cluster` is what a launcher needs of it; `podman/` answers the same questions on one machine.
Objects are plain JSON; the official client makes the requests. A `Follower` keeps a list up to date
on a thread of its own, through time-outs, lost connections, expired resource versions (410) and
outages.

Invariants: whatever was missed while nobody watched is found by the next list; nothing here decides
anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import kubernetes
import urllib3
from kubernetes.client import ApiException

from lightning_ray.config import ConfigError
from lightning_ray.records import Json
from lightning_ray.rollouts.pods.reconcile import Kind
from lightning_ray.sections import KubernetesSection

# What a request may raise when the API server is away, or whoever renews our token.
OUTAGE = (urllib3.exceptions.HTTPError, OSError, kubernetes.config.ConfigException)
_GONE = 410
_CONFLICT = 409
_WATCH_S = 300  # the server ends a watch after so long; then another begins where it ended
QUIET_S = 90.0  # so does one that brought nothing for so long: a bookmark comes every minute
_READ_S = 30.0  # for any other answer
_PAGE = 500  # objects in one answer of a list
# A value of the header `Warning` (RFC 7234, 5.5): code, who warns, text.
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Away(ConfigError):
    """The API server does not answer, or not yet: it may later."""


class Cluster(Protocol):
    """What runs Jobs, and is followed. Its methods are described in `Api`, and may raise
    `ApiException` and `OUTAGE`. `called` is what a person calls it, `place` says what rollouts
    are there."""

    called: str
    namespace: str

    @property
    def place(self) -> str: ...

    def create_job(self, job: Json) -> Json: ...
    def dry_run(self, job: Json) -> list[str]: ...
    def read_job(self, name: str) -> Json: ...
    def create_secret(self, secret: Json) -> None: ...
    def delete_job(self, name: str, uid: str) -> None: ...
    def delete_pod(self, name: str) -> None: ...
    def log(self, pod: str, container: str, most_bytes: int) -> bytes: ...
    def list(self, kind: Kind, selector: str) -> tuple[list[Json], str]: ...
    def watch(self, kind: Kind, selector: str, version: str) -> Iterator[Json]: ...
    def owner(self) -> Json | None: ...
    def address(self, gateway_url: str) -> str: ...
    def removal(self, selector: str) -> str: ...
    def close(self) -> None: ...


class Api:
    """One namespace of a cluster.

    Raises:
        ConfigError: there is no cluster, or no such kubeconfig or context.
    """

    called = "the API server"

    def __init__(self, config: KubernetesSection) -> None:
        settings = kubernetes.client.Configuration()
        settings.retries = False  # we know better when to try again
        try:
            if (
                not (config.kubeconfig or config.context)
                and "KUBERNETES_SERVICE_HOST" in os.environ
            ):
                kubernetes.config.load_incluster_config(client_configuration=settings)
                namespace = _OWN_NAMESPACE.read_text().strip()
            else:
                path = config.kubeconfig or kubernetes.config.KUBE_CONFIG_DEFAULT_LOCATION
                kubernetes.config.load_kube_config(
                    path, config.context, settings, persist_config=False
                )
                contexts, current = kubernetes.config.list_kube_config_contexts(path)
                chosen = next((c for c in contexts if c["name"] == config.context), current)
                namespace = chosen["context"].get("namespace", "default")
        except (kubernetes.config.ConfigException, OSError) as error:
            raise ConfigError(
                f"kubernetes: no cluster to run rollouts on: {error}. In a pod it needs a service "
                "account, elsewhere kubernetes.kubeconfig or kubectl's own"
            ) from error
        self.namespace = config.namespace or namespace
        settings.connection_pool_maxsize = 24
        self._client = kubernetes.client.ApiClient(settings)
        self._batch: Any = kubernetes.client.BatchV1Api(self._client)
        self._core: Any = kubernetes.client.CoreV1Api(self._client)

    def create_job(self, job: Json) -> Json:
        """The Job as the server made it.

        Raises:
            ApiException: refused.
        """
        return _json(self._batch.create_namespaced_job(self.namespace, job, **_raw()))

    def dry_run(self, job: Json) -> list[str]:
        """What the server warns of in `job`, which it does not make.

        Raises:
            ApiException: refused.
        """
        options = {"dry_run": "All", "field_validation": "Strict"}
        answer = self._batch.create_namespaced_job(self.namespace, job, **options, **_raw())
        _json(answer)
        found = (
            text for one in answer.headers.getlist("Warning") for text in _WARNING.findall(one)
        )
        return [re.sub(r"\\(.)", r"\1", text) for text in found]

    def read_job(self, name: str) -> Json:
        return _json(self._batch.read_namespaced_job(name, self.namespace, **_raw()))

    def create_secret(self, secret: Json) -> None:
        """Makes a Secret; one of that name stays as it is."""
        try:
            _json(self._core.create_namespaced_secret(self.namespace, secret, **_raw()))
        except ApiException as error:
            if error.status != _CONFLICT:
                raise

    def delete_job(self, name: str, uid: str) -> None:
        """Deletes a Job and its pod; one that is gone, or another of that name, is left alone."""
        options = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
            # Nothing in the pod has anything to save.
            "gracePeriodSeconds": 0,
        }
        try:
            _json(self._batch.delete_namespaced_job(name, self.namespace, body=options, **_raw()))
        except ApiException as error:
            if error.status not in (404, _CONFLICT):
                raise

    def delete_pod(self, name: str) -> None:
        """Ends a pod at once, whatever grace its template gives it."""
        options = {"gracePeriodSeconds": 0}
        try:
            _json(self._core.delete_namespaced_pod(name, self.namespace, body=options, **_raw()))
        except ApiException as error:
            if error.status != 404:
                raise

    def log(self, pod: str, container: str, most_bytes: int) -> bytes:
        """What a container of a pod wrote."""
        answer = self._core.read_namespaced_pod_log(
            pod, self.namespace, container=container, limit_bytes=most_bytes, **_raw()
        )
        content: bytes = _checked(answer).data
        return content

    def read_pod(self, name: str) -> Json:
        return _json(self._core.read_namespaced_pod(name, self.namespace, **_raw()))

    @property
    def place(self) -> str:
        return f"Jobs in the namespace {self.namespace}"

    def owner(self) -> Json | None:
        """What our Jobs go with: whatever owns the pod we run in, a RayCluster say."""
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            return None
        with contextlib.suppress(ApiException, *OUTAGE):
            pod = self.read_pod(os.environ.get("HOSTNAME", ""))
            for owner in pod["metadata"].get("ownerReferences") or []:
                if owner.get("controller"):
                    named = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
                    return {**named, "blockOwnerDeletion": False}
        return None

    def address(self, gateway_url: str) -> str:
        """Where pods reach the gateway, which is at `gateway_url` for us."""
        return gateway_url

    def removal(self, selector: str) -> str:
        """A command that deletes what `selector` selects."""
        return f"kubectl -n {self.namespace} delete jobs -l {selector}"

    def close(self) -> None:
        """Nothing: every request is closed when it is answered."""

    def list(self, kind: Kind, selector: str) -> tuple[list[Json], str]:
        """All objects with these labels, and the resource version from which to watch on."""
        found: list[Json] = []
        page: str | None = None
        while True:
            answer = _json(
                self._lister(kind)(
                    self.namespace, label_selector=selector, limit=_PAGE, _continue=page, **_raw()
                )
            )
            found += answer["items"]
            page = answer["metadata"].get("continue")
            if not page:
                return found, answer["metadata"]["resourceVersion"]

    def watch(self, kind: Kind, selector: str, version: str) -> Iterator[Json]:
        """Events from a resource version on, until the server ends them. Bookmarks are among
        them."""
        answer = self._lister(kind)(
            self.namespace,
            label_selector=selector,
            resource_version=version,
            allow_watch_bookmarks=True,
            watch=True,
            timeout_seconds=_WATCH_S,
            _preload_content=False,
            _request_timeout=(_READ_S, QUIET_S),
        )
        try:
            for line in kubernetes.watch.watch.iter_resp_lines(_checked(answer)):
                if line:
                    yield json.loads(line)
        finally:
            answer.close()

    def _lister(self, kind: Kind) -> Callable[..., Any]:
        if kind == "jobs":
            listing: Callable[..., Any] = self._batch.list_namespaced_job
        else:
            listing = self._core.list_namespaced_pod
        return listing


class Follower(threading.Thread):
    """Follows the objects of a kind with these labels: `listed(objects, asked_at)` with all of them
    at first and after each gap, `event(type, object)` in between, `away(reason)` when the server
    does not answer and `away("")` when it does again. Times are those of `time.monotonic`."""

    def __init__(
        self,
        api: Cluster,
        kind: Kind,
        selector: str,
        listed: Callable[[list[Json], float], None],
        event: Callable[[str, Json], None],
        away: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"follow {kind}", daemon=True)
        self._api, self._kind, self._selector = api, kind, selector
        self._listed, self._event, self._away = listed, event, away
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        wait_s = _FIRST_WAIT_S
        version = ""
        while not self._stopped.is_set():
            try:
                if not version:
                    asked_at = time.monotonic()
                    objects, version = self._api.list(self._kind, self._selector)
                    self._listed(objects, asked_at)
                self._away("")
                began = time.monotonic()
                version = self._watch(version)
                if time.monotonic() - began < _FIRST_WAIT_S:
                    self._stopped.wait(_FIRST_WAIT_S)  # somebody ends watches at once
                wait_s = _FIRST_WAIT_S
                continue
            except ApiException as error:
                problem = f"HTTP {error.status} {error.reason}"
            except Exception as error:  # a thread that ends would leave the run blind
                problem = f"{type(error).__name__}: {error}"[:200]
            # Whatever it was, a list puts it right.
            version = ""
            self._away(problem)
            self._stopped.wait(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, _MOST_WAIT_S)

    def _watch(self, version: str) -> str:
        """The version from which to watch on; empty if there must be a new list."""
        try:
            for event in self._api.watch(self._kind, self._selector, version):
                if self._stopped.is_set():
                    break
                thing = event["object"]
                if event["type"] == "ERROR":
                    if thing.get("code") == _GONE:
                        return ""
                    raise ApiException(thing.get("code"), thing.get("message"))
                version = thing["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._event(event["type"], thing)
        except urllib3.exceptions.ReadTimeoutError:
            pass  # quiet, or a connection that died without a word: a new one tells
        return version


def _raw() -> dict[str, Any]:
    return {"_preload_content": False, "_request_timeout": _READ_S}


def _checked(answer: Any) -> Any:
    """Newer clients leave it to the caller to look at the status of a raw answer."""
    if not 200 <= answer.status <= 299:
        error = ApiException(status=answer.status, reason=answer.reason)
        error.body = answer.data.decode(errors="replace")
        raise error
    return answer


def _json(answer: Any) -> Json:
    try:
        content: Json = json.loads(_checked(answer).data)
        return content
    except ValueError as error:  # a proxy's own page, say
        raise ApiException(status=502, reason="the answer is no JSON") from error
