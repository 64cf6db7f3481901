"""A run's folder on the machine of its containers: termination messages, and the way out.

Invariants: nobody but this user enters it; it is the same in every life of the run; whoever carries
bytes between containers and the gateway (`way.py`) ends when it is gone, or nobody has asked for it
for long.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from lightning_ray.config import ConfigError
from lightning_ray.rollouts.pods.podman import way

_MOST_MESSAGE = 4096  # bytes, as in Kubernetes
_START_S = 20.0  # for who carries bytes to begin, on a machine that is busy


class Folder:
    """That of the run `run_id`."""

    def __init__(self, run_id: str) -> None:
        # Not in the run's own: the path of a Unix socket has 107 bytes.
        self.path = Path(tempfile.gettempdir(), f"lr-podman-{os.getuid()}-{run_id}")
        self._has_way = False

    @property
    def way(self) -> Path:
        """What a container sees of it."""
        return self.path / Path(way.SOCKET).parent

    def job(self, name: str) -> Path:
        return self.path / name

    def message(self, name: str) -> str:
        """The termination message of a container; empty if it has none."""
        try:
            with (self.job(name) / "termination-log").open("rb") as file:
                return file.read(_MOST_MESSAGE).decode(errors="replace")  # whatever is behind it
        except OSError:
            return ""

    def make(self, *below: Path) -> None:
        """Makes it, and folders in it that a container's user, who is nobody here, may enter.

        Raises:
            ConfigError: it is somebody else's.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.path} is somebody else's: remove it")
        for folder in below:
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)

    def make_job(self, name: str) -> None:
        """Makes that of a Job, with an empty message."""
        self.make(self.job(name))
        message = self.job(name) / "termination-log"
        message.touch()
        message.chmod(0o666)

    def remove_job(self, name: str) -> None:
        shutil.rmtree(self.job(name), ignore_errors=True)

    def remove(self) -> None:
        self._has_way = False
        shutil.rmtree(self.path, ignore_errors=True)

    def address(self, gateway_url: str) -> str:
        """Where a container reaches the gateway, which this machine reaches at `gateway_url`.

        Raises:
            ConfigError: bytes cannot be carried there.
        """
        parts = urlsplit(gateway_url)
        if parts.scheme != "http":
            raise ConfigError(
                f"gateway.advertise={gateway_url}: containers of podman reach the gateway by way "
                "of this machine, over http: leave it out"
            )
        self.make(self.way)
        port = parts.port or 80
        (self.path / way.ADDRESS).write_text(f"{parts.hostname}:{port}")
        self._has_way = True
        self.keep_way()
        deadline = time.monotonic() + _START_S
        while not self._carries():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"nobody listens on {self.path / way.SOCKET}, by which containers reach the "
                    "gateway (its path may have 107 bytes: is TMPDIR longer?)"
                )
            time.sleep(0.05)
        return f"http://127.0.0.1:{port}{parts.path}"

    def keep_way(self) -> None:
        """Sees to it that somebody carries, if this process has asked for an address."""
        if not self._has_way:
            return
        with contextlib.suppress(OSError):
            os.utime(self.path / way.ADDRESS)
        if self._carries():
            return
        subprocess.run(
            [sys.executable, "-I", way.__file__, "outside", str(self.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            check=True,
        )

    def _carries(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path / way.SOCKET))
            except (TimeoutError, BlockingIOError):
                pass  # it is there, and busy
            except OSError:
                return False
        return True
