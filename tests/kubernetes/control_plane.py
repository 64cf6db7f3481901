"""A real Kubernetes control plane on loopback, with a kubelet that runs pods as processes.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler are the real programs (`build.sh`).
`kubelet.py` stands for a node. Each can be killed and started again by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes import client, config

from lightning_ray.gateway.deploy import free_port

HERE = Path(__file__).parent
READY_S = 90
TOKENS = {"admin": "system:masters", "controller": "none"}


def build() -> Path:
    """The folder of the programs; built first where they are not in the cache (eight minutes)."""
    built = subprocess.run([str(HERE / "build.sh")], stdout=subprocess.PIPE, text=True, check=True)
    return Path(built.stdout.strip())


class Cluster:
    """Processes of a cluster whose files are in `folder`. Use as a context."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self._programs = folder, programs
        self._ports = {name: free_port() for name in ("client", "peer", "api")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"https://127.0.0.1:{self._ports['api']}"

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._path("sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        tokens = [f"{name}-token,{name},{name},{group}" for name, group in TOKENS.items()]
        self._path("tokens.csv").write_text("\n".join(tokens) + "\n")
        for name in TOKENS:
            self._write_kubeconfig(name)
        self.start_etcd()
        self.start_api()
        shared = ["--kubeconfig", str(self.kubeconfig()), "--leader-elect=false", "--port=0"]
        self._start(
            "kube-controller-manager",
            *shared,
            f"--service-account-private-key-file={self._path('sa.key')}",
            "--use-service-account-credentials=false",
            "--feature-gates=TTLAfterFinished=true",
            f"--cert-dir={self._path('cm')}",
            "--bind-address=127.0.0.1",
            "--secure-port=0",
            # As fast as they may be: the tests wait for nodes to be missed and for Jobs to be made.
            "--node-monitor-grace-period=8s",
            "--node-monitor-period=1s",
            "--pod-eviction-timeout=2s",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )
        self._start(
            "kube-scheduler",
            *shared,
            f"--cert-dir={self._path('scheduler')}",
            "--bind-address=127.0.0.1",
            "--secure-port=0",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )
        config.load_kube_config(str(self.kubeconfig()))
        self.core = client.CoreV1Api()
        self.batch = client.BatchV1Api()
        self.until(lambda: self.core.read_namespaced_service_account("default", "default"))
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self.kill(name)

    def kubeconfig(self, user: str = "admin") -> Path:
        return self._path(f"{user}.kubeconfig")

    def start_etcd(self) -> None:
        url = f"http://127.0.0.1:{self._ports['client']}"
        peer = f"http://127.0.0.1:{self._ports['peer']}"
        self._start(
            "etcd",
            f"--data-dir={self._path('etcd')}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def start_api(self) -> None:
        """Starts the API server and waits until it is ready."""
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._ports['client']}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports['api']}",
            f"--cert-dir={self._path('certs')}",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-key-file={self._path('sa.key')}",
            f"--service-account-signing-key-file={self._path('sa.key')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--api-audiences=https://kubernetes.default.svc",
            f"--token-auth-file={self._path('tokens.csv')}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--feature-gates=TTLAfterFinished=true",
            # So that an old resource version is refused (410) as soon as etcd is compacted.
            "--watch-cache=false",
            "--max-requests-inflight=2000",
            "--max-mutating-requests-inflight=1000",
        )
        self.until(lambda: "ok" in self._ready(), "kube-apiserver")

    def start_node(self, name: str = "node-0", **env: str) -> None:
        """A node that runs pods as processes of this machine."""
        self._start(
            name,
            str(HERE / "kubelet.py"),
            program=sys.executable,
            KUBECONFIG=str(self.kubeconfig()),
            NODE=name,
            FOLDER=str(self._path(name)),
            **env,
        )
        self.until(lambda: self.core.read_node(name))

    def kill(self, name: str) -> None:
        """SIGKILL to one of the processes and its group."""
        process = self._processes.pop(name, None)
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def compact(self) -> None:
        """Makes etcd forget all old versions, so that a watch from one of them is refused."""
        ctl = [str(self._programs / "etcdctl"), f"--endpoints=127.0.0.1:{self._ports['client']}"]
        env = {**os.environ, "ETCDCTL_API": "3"}
        told = subprocess.check_output([*ctl, "get", "/none", "-w", "json"], env=env)
        revision = json.loads(told)["header"]["revision"]
        subprocess.run([*ctl, "compact", str(revision)], env=env, check=True, capture_output=True)

    def apply(self, path: Path) -> list[Any]:
        """Creates every object of a YAML file."""
        from kubernetes import utils

        return [
            utils.create_from_dict(client.ApiClient(), tree)
            for tree in yaml.safe_load_all(path.read_text())
            if tree
        ]

    def until(self, what: Callable[[], Any], log: str = "", seconds: float = READY_S) -> Any:
        """What `what` returns as soon as it is true and raises nothing."""
        deadline = time.monotonic() + seconds
        while True:
            error: BaseException | None = None
            try:
                if found := what():
                    return found
            except (client.ApiException, OSError, subprocess.SubprocessError) as problem:
                error = problem
            except Exception as problem:  # urllib3's, while the server is away
                if "urllib3" not in type(problem).__module__:
                    raise
                error = problem
            if time.monotonic() > deadline:
                tail = self.log(log)[-2000:] if log else ""
                raise AssertionError(f"not within {seconds:g} s: {error}\n{tail}")
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return self._path(f"{name}.log").read_text(errors="replace")

    def _ready(self) -> str:
        import urllib3

        with urllib3.PoolManager(ca_certs=str(self._path("certs/apiserver.crt"))) as pool:
            headers = {"Authorization": "Bearer admin-token"}
            answer = pool.request("GET", f"{self.url}/readyz", headers=headers, retries=False)
            return answer.data.decode()

    def _start(self, name: str, *arguments: str, program: str = "", **env: str) -> None:
        with self._path(f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program or str(self._programs / name), *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def _write_kubeconfig(self, user: str) -> None:
        cluster = {
            "server": self.url,
            "certificate-authority": str(self._path("certs/apiserver.crt")),
        }
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": f"{user}-token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        self.kubeconfig(user).write_text(yaml.safe_dump(tree))

    def _path(self, name: str) -> Path:
        return self.folder / name


def bubblewrap() -> str:
    found = shutil.which("bwrap")
    assert found, "the test kubelet runs containers in bubblewrap"
    return found
