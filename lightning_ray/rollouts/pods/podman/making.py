"""Makes the containers of Jobs, and removes them: images, volumes, init containers, the container.

Invariants: a container that cannot be made now is tried again until nobody wants it; one that
nobody wants any more is not left, however far it was.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_ray.records import Json
from lightning_ray.rollouts.pods import manifest
from lightning_ray.rollouts.pods.podman import containers
from lightning_ray.rollouts.pods.podman.command import Done, podman, sure
from lightning_ray.rollouts.pods.podman.containers import Making
from lightning_ray.rollouts.pods.podman.folder import Folder

_AGAIN_S = 5.0
_REMOVE_S = 1800.0  # an agent may have left millions of files
_JOB_LABEL = "lightning-ray/job"  # of volumes
# Statuses of `podman run`: its own fault; a program that cannot be executed, or is not there.
_OWN_FAULT, _NO_PROGRAM = 125, (126, 127)
_NOT_THERE = re.compile("executable file|exec format|no such file", re.I)
_AT_A_TIME = 4  # containers that are being started: each is work for a core


class _NotYet(Exception):
    """It may be possible later; by a reason of Kubernetes, and in podman's words."""

    def __init__(self, reason: str, said: object) -> None:
        super().__init__(said)
        words = " ".join(str(said).split())
        self.state: Json = {"waiting": {"reason": reason, "message": words}}


@dataclass
class Made:
    """A Job whose container is not there yet, and how its pod stands meanwhile."""

    job: Json
    uid: str = field(default_factory=lambda: secrets.token_hex(16))
    begun: bool = False
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    init_statuses: Sequence[Json] = ()
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def noted(self) -> Json:
        """The Job, as it is listed."""
        metadata = {**self.job["metadata"], "uid": self.uid, "resourceVersion": "1"}
        return {"metadata": metadata, "status": {"conditions": []}}

    @property
    def pod(self) -> Json:
        return containers.pod(self.noted["metadata"], self.state, self.init_statuses)


class Maker:
    """Makes those of the run `run_id`."""

    def __init__(self, run_id: str, folder: Folder) -> None:
        self._label, self._folder = f"{manifest.RUN_LABEL}={run_id}", folder
        self._pulling: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._starting = threading.Semaphore(_AT_A_TIME)

    def make(self, made: Made, secret: Mapping[str, str]) -> bool:
        """Makes a container, however often it takes. Returns whether it is there: else nobody wants
        it any more, or it ended before it began, as `made` says."""
        name, there, over = made.job["metadata"]["name"], False, False
        while not (there or over or made.gone.is_set()):
            try:
                there = self._try(made, secret)
                over = "terminated" in made.state
            except _NotYet as error:
                made.state = error.state
            except Exception as error:  # a thread that ends would leave its Job waiting
                said = f"podman: {type(error).__name__}: {error}"
                made.state = _NotYet("CreateContainerError", said).state
            if not (there or over):
                made.gone.wait(_AGAIN_S)
        if made.gone.is_set():
            self.remove(name)
        return there

    def _try(self, made: Made, secret: Mapping[str, str]) -> bool:
        name = made.job["metadata"]["name"]
        folder = self._folder.job(name)
        making = Making(made.job, made.uid, secret, str(folder), str(self._folder.way))
        for image, policy in making.images.items():
            self._pull(image, policy)
        self._folder.make_job(name)
        for volume in making.volumes:
            argv = ("--label", self._label, "--label", f"{_JOB_LABEL}={name}", volume)
            done = podman("volume", "create", *argv)
            if done.returncode and "already exists" not in done.stderr:
                raise _NotYet("CreateContainerError", done.stderr)
        for called, init in making.inits():
            if made.gone.is_set():
                return False
            done = self._run(folder, init)
            if done.returncode:
                ended = {"exitCode": done.returncode, "message": done.stdout + done.stderr}
                made.init_statuses = [{"name": called, "state": {"terminated": ended}}]
                made.state = {"terminated": {"exitCode": done.returncode}}
                return False
        argv_of_main, told = making.main()
        with self._starting:
            if made.gone.is_set():
                return False
            done = self._run(folder, argv_of_main, told)
        if done.returncode in _NO_PROGRAM:
            ended = {"exitCode": 128, "reason": "StartError", "message": done.stderr}
            made.state = {"terminated": ended}
        return not done.returncode

    def _run(self, folder: Path, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Done:
        """Runs a container; an init container to its end. What keeps it writes into its folder that
        it had no memory left, say: `folder`.

        Raises:
            _NotYet: podman could not make it.
        """
        done = podman("run", *argv, env=env, cwd=folder, timeout_s=None)
        # Other faults of the runtime have the same statuses as a program that is not there.
        silent = done.returncode in _NO_PROGRAM and not _NOT_THERE.search(done.stderr)
        if done.returncode == _OWN_FAULT or (silent and "--detach" in argv):
            name = next(one for one in argv if one.startswith("--name=")).partition("=")[2]
            podman("rm", "--force", "--ignore", name)
            raise _NotYet("CreateContainerError", done.stderr)
        return done

    def _pull(self, image: str, policy: str) -> None:
        with self._pulling[image]:
            there = not podman("image", "exists", image).returncode
            if policy == "never" and not there:
                raise _NotYet("ErrImageNeverPull", f"{image} is not on this machine")
            if policy == "always" or not there:
                done = podman("pull", "--quiet", image, timeout_s=None)
                if done.returncode:
                    invalid = "invalid reference format" in done.stderr
                    raise _NotYet("InvalidImageName" if invalid else "ErrImagePull", done.stderr)

    def remove(self, name: str) -> None:
        """Removes the container of a Job, and all that was made for it.

        Raises:
            OSError: podman did not do it.
        """
        inits = f"label={containers.INIT_LABEL}={name}"
        found = podman("ps", "--all", "--quiet", "--filter", inits).stdout.split()
        for container in (name, *found):
            argv = ("--force", "--ignore", "--time=0", "--volumes", container)
            sure(podman("rm", *argv, timeout_s=_REMOVE_S))
        # By its name, which has a digest: `podman run` makes one that was removed without labels.
        found = podman("volume", "ls", "--quiet", "--filter", f"name={name}-").stdout.split()
        for volume in found:
            done = podman("volume", "rm", "--force", volume, timeout_s=_REMOVE_S)
            if "no such volume" not in done.stderr:  # another thread is at it
                sure(done)
        self._folder.remove_job(name)

    def sweep(self, kept: set[str]) -> None:
        """Removes what was being made for other Jobs than `kept`, when an earlier life ended."""
        lost = set[str | None]()
        for listing, label in (
            (("ps", "--all"), containers.INIT_LABEL),
            (("volume", "ls"), _JOB_LABEL),
        ):
            found = sure(podman(*listing, "--format=json", "--filter", f"label={self._label}"))
            lost |= {(one["Labels"] or {}).get(label) for one in json.loads(found.stdout or "[]")}
        for name in lost - kept - {None}:
            self.remove(str(name))
