"""podman on this machine, asked what the API of Kubernetes is asked. Blocking.

A Job is one container (`containers.py`). A thread makes it (`making.py`); from then on it is
podman's to keep, and until then the Job is known to this process only. Lists and
watches are looks at `podman ps`.

Invariants: a container outlives this process, with what a later one needs in its labels; nothing of
another run is touched.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kubernetes.client import ApiException

from lightning_ray.records import Json
from lightning_ray.rollouts.pods import manifest
from lightning_ray.rollouts.pods.podman import command, containers
from lightning_ray.rollouts.pods.podman.command import podman, sure
from lightning_ray.rollouts.pods.podman.folder import Folder
from lightning_ray.rollouts.pods.podman.making import Made, Maker
from lightning_ray.rollouts.pods.reconcile import Kind

_LOOK_S = 1.0  # between two looks at what there is
_WATCH_S = 300.0

_Seen = dict[Kind, dict[str, Json]]  # objects by uid


class Podman:
    """The containers of the run `run_id`, as an `api.Cluster`.

    Raises:
        ConfigError: there is no podman here, or it cannot be used.
    """

    called = "podman"
    namespace = "podman"

    def __init__(self, run_id: str) -> None:
        command.check()
        self._label = f"label={manifest.RUN_LABEL}={run_id}"
        self._folder = Folder(run_id)
        self._maker = Maker(run_id, self._folder)
        self._lock = threading.Lock()
        self._making: dict[str, Made] = {}  # by name
        self._ends: dict[str, Json] = {}  # by uid
        self._told: _Seen = {"jobs": {}, "pods": {}}
        self._seen, self._seen_at = self._told, 0.0
        self._closed = threading.Event()
        self._removed: set[str] = set()  # by us, uids
        self._swept = False

    def create_job(self, job: Json) -> Json:
        """Notes the Job; its container is made once its Secret is there.

        Raises:
            ApiException: there is one of that name, or podman cannot carry it out.
        """
        self.dry_run(job)
        name = job["metadata"]["name"]
        with self._lock:
            if name in self._making or not podman("container", "exists", name).returncode:
                raise ApiException(status=409, reason="Conflict")
            made = self._making[name] = Made(job)
        return made.noted

    def dry_run(self, job: Json) -> list[str]:
        """What podman leaves out of `job`.

        Raises:
            ApiException: what it cannot carry out, with the fields.
        """
        causes = [{"field": at, "message": why} for at, why in containers.faults(job)]
        if causes:
            error = ApiException(status=422, reason="Invalid")
            error.body = json.dumps({"message": "podman cannot", "details": {"causes": causes}})
            raise error
        return [f"{one} is left out" for one in containers.left_out(job)]

    def read_job(self, name: str) -> Json:
        for job in self._look()["jobs"].values():
            if job["metadata"]["name"] == name:
                return job
        raise ApiException(status=404, reason="Not Found")

    def create_secret(self, secret: Json) -> None:
        """Has the container of the Secret's Job made, which is told what the Secret holds."""
        name = secret["metadata"]["name"]
        with self._lock:
            made = self._making.get(name)
            if made is None or made.begun:
                return
            made.begun = True
        _spawn(self._make, name, made, secret["stringData"])

    def delete_job(self, name: str, uid: str) -> None:
        """Removes the Job's container and what belongs to it; a namesake is left alone."""
        with self._lock:
            self._removed.add(uid)
            made = self._making.get(name)
            if made and made.uid == uid:
                made.gone.set()
                del self._making[name]
        there = next((c for c in self._containers() if c["Names"][0] == name), None)
        if there is None or there["Labels"][containers.UID_LABEL] == uid:
            self._maker.remove(name)

    def delete_pod(self, name: str) -> None:
        """Nothing: it went with its Job."""

    def log(self, pod: str, container: str, most_bytes: int) -> bytes:
        """The first `most_bytes` of what the container wrote."""
        with subprocess.Popen(
            ["podman", "logs", pod],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            content = process.stdout.read(most_bytes)
            process.kill() if len(content) == most_bytes else None
        if process.returncode > 0:
            raise ApiException(status=404, reason=content.decode(errors="replace")[-500:])
        return content

    def list(self, kind: Kind, selector: str) -> tuple[list[Json], str]:
        """All objects with these labels, and what stands for a resource version."""
        if not self._swept:
            kept = {one["Names"][0] for one in self._containers()} | self._making.keys()
            self._maker.sweep(kept)
            self._swept = True
        labels = dict(label.split("=", 1) for label in selector.split(","))
        self._told[kind] = self._look(0.0)[kind]
        every = self._told[kind].values()
        return [o for o in every if labels.items() <= o["metadata"]["labels"].items()], "1"

    def watch(self, kind: Kind, selector: str, version: str) -> Iterator[Json]:
        """What has changed since the last list or watch, and changes."""
        deadline = time.monotonic() + _WATCH_S
        while not self._closed.wait(_LOOK_S) and time.monotonic() < deadline:
            before, now = self._told[kind], self._look()[kind]
            self._told[kind] = now
            for uid, thing in now.items():
                if before.get(uid) != thing:
                    yield {"type": "MODIFIED" if uid in before else "ADDED", "object": thing}
            for uid in before.keys() - now.keys():
                yield {"type": "DELETED", "object": before[uid]}

    @property
    def place(self) -> str:
        return f"containers of podman on {socket.gethostname()}"

    def owner(self) -> Json | None:
        return None

    def address(self, gateway_url: str) -> str:
        """Where a container reaches the gateway. Raises ConfigError, see `Folder.address`."""
        return self._folder.address(gateway_url)

    def close(self) -> None:
        """Ends what this process began. Containers that are left stay, and keep their way out."""
        self._closed.set()
        with self._lock:
            for made in self._making.values():
                made.gone.set()
        with contextlib.suppress(OSError):
            left = {one["Names"][0] for one in self._containers()}
            self._maker.sweep(left)
            if not left:
                self._folder.remove()

    def removal(self, selector: str) -> str:
        """A command for a person who wants them gone."""
        return f"podman rm --force --volumes $(podman ps -aq --filter label={selector})"

    # -------------------------------------------------------------------------------------------

    def _make(self, name: str, made: Made, secret: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # what could not be removed now: the next sweep's matter
            if self._maker.make(made, secret):
                with self._lock:
                    self._making.pop(name, None)

    def _look(self, oldest_s: float = _LOOK_S * 0.8) -> _Seen:
        """Everything, as of `oldest_s` ago at most."""
        asked_at = time.monotonic()
        with self._lock:
            if asked_at - self._seen_at < oldest_s or self._seen_at > asked_at:
                return self._seen
            began = time.monotonic()
            jobs, pods = dict[str, Json](), dict[str, Json]()
            for container in self._containers():
                job = containers.job_of(container)
                uid = job["metadata"]["uid"]
                try:
                    state = self._state(container)
                except OSError:  # it is being removed, or busy: as it was
                    state = {"running": {}}
                jobs[uid], pods[uid] = job, containers.pod(job["metadata"], state)
                if _over(container) and uid not in self._removed:
                    self._removed.add(uid)
                    _spawn(self._remove, container["Names"][0], uid)
            for made in self._making.values():
                jobs[made.uid], pods[made.uid] = made.noted, made.pod
            for uid in self._seen["jobs"].keys() - jobs.keys() - self._removed:
                # Somebody removed it: what belonged to it is left.
                _spawn(self._remove, self._seen["jobs"][uid]["metadata"]["name"], uid)
            self._ends = {uid: end for uid, end in self._ends.items() if uid in jobs}
            self._removed &= jobs.keys()
            self._seen, self._seen_at = {"jobs": jobs, "pods": pods}, began
            self._folder.keep_way()
            return self._seen

    def _containers(self) -> Sequence[Json]:
        """Those of the run's Jobs, as `podman ps` has them."""
        done = sure(podman("ps", "--all", "--format=json", "--filter", self._label))
        every: Sequence[Json] = json.loads(done.stdout or "[]")
        return [one for one in every if containers.INIT_LABEL not in one["Labels"]]

    def _state(self, container: Json) -> Json:
        if container["State"] in ("running", "paused", "stopping"):
            return {"running": {}}
        if container["State"] not in containers.ENDED:
            if container.get("StartedAt", 0) > 0:  # the machine was started again
                return {"terminated": containers.UNKNOWN}
            return {"waiting": {"reason": "ContainerCreating"}}
        uid, name = container["Labels"][containers.UID_LABEL], container["Names"][0]
        if uid not in self._ends:
            inspected = json.loads(sure(podman("container", "inspect", name)).stdout)[0]
            message = self._folder.message(name)
            if not message and 0 < inspected["State"]["ExitCode"] < 128:
                # It had no order yet: else our program leaves one, or ends with 0 or 255.
                message = "\n".join(podman("logs", "--tail=5", name).stderr.splitlines()[-5:])
            self._ends[uid] = {"terminated": containers.ended(inspected["State"], message)}
        return self._ends[uid]

    def _remove(self, name: str, uid: str) -> None:
        try:
            self._maker.remove(name)
        except OSError:
            with self._lock:
                self._removed.discard(uid)


def _over(container: Json) -> bool:
    """Whether an ended container has been kept long enough."""
    ended_at = container.get("ExitedAt") or 0
    keep_s = int(container["Labels"][containers.TTL_LABEL])
    return container["State"] in containers.ENDED and 0 < ended_at < time.time() - keep_s


def _spawn(work: Callable[..., None], *args: Any) -> None:
    """In a thread that holds up nobody's end."""
    threading.Thread(target=work, args=args, name="podman", daemon=True).start()
