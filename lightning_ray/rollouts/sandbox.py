"""What a harness can reach of the machine that it runs on.

`protection` finds out, once per process, what this machine can give; `around` describes the sandbox
of one attempt: bubblewrap's arguments, and where the gateway is. Who builds and enters it is in
`box.py`, the system calls that it refuses are in `syscalls.py`; the way out is in `relay.py`.
`prefix` and `room` are for graders.

Inside there are: the system's programs and libraries and a few files of /etc, read-only; what the
recipe names (its environment, its interpreter, files of its command), read-only; the attempt's
workspace, home, task and tmp, at the paths that they have in every attempt (`places.py`); new
/proc, /dev and /dev/shm. Nothing else of the file system, no other process, and no network but the
gateway. Invariants: the run directory and the operator's home stay hidden also where they lie below
a system folder; nothing in the box can be written but the attempt's own folders, whose disk is
limited, and /dev/shm, which is small; where a sandbox has worked, nothing runs without one.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.files import cache_root
from lightning_ray.rollouts import process, syscalls
from lightning_ray.rollouts.places import IN_SANDBOX, Places
from lightning_ray.rollouts.process import Limits, Sandbox

# Not /opt and /nix/store: nobody knows what an operator keeps there (`rollout.sandbox_paths`).
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# The rest of /etc is the operator's: keys, passwords, mounts.
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "group", "inputrc", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "login.defs", "magic", "mime.types",
    "nsswitch.conf", "os-release", "passwd", "perl", "pki/ca-trust", "pki/tls/certs", "profile",
    "protocols", "python3", "services", "shells", "ssl/certs", "ssl/openssl.cnf", "terminfo",
    "timezone",
)  # fmt: skip
# What a container runtime withholds from bubblewrap, in the words of a pod's specification.
_POD = (
    "in a pod it needs seccompProfile: {type: Unconfined} (or a Localhost profile that allows "
    "clone, unshare, setns, mount, umount2 and pivot_root), procMount: Unmasked with hostUsers: "
    "false and, where the node has AppArmor, appArmorProfile: {type: Unconfined}"
)
_SHM_BYTES = 64 << 20  # as in a Docker container: it is memory that belongs to no process
_SCRATCH_BYTES = 256 << 20  # of a grading run: it is memory
_PROBE_S = 30.0  # a probe takes 0.2
_ABSENT = "bubblewrap is not installed"
_GRADERS = "LIGHTNING_RAY_SANDBOX"  # tells graders what the run's configuration wants
_REQUIRE = "require"


class Mode(StrEnum):
    """`rollout.sandbox`."""

    AUTO = "auto"  # bubblewrap where this machine can, else none
    BUBBLEWRAP = "bubblewrap"  # bubblewrap, or the attempt is not started
    NONE = "none"  # a harness runs with the rights of the user who runs Ray


@dataclass(frozen=True)
class Wanted:
    """What the configuration says: `require` refuses to run with less than everything; `paths` are
    further ones that a harness can read; `hidden` must not be seen wherever they lie."""

    mode: Mode = Mode.AUTO
    require: bool = False
    paths: tuple[str, ...] = ()
    hidden: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Protection:
    """What this machine can give: the path of bubblewrap if it works, and whether a box has a
    network of its own. `missing` says what it cannot give, and why, in half a sentence each."""

    bubblewrap: str | None
    network: bool
    missing: tuple[str, ...] = ()


class SandboxError(ConfigError):
    """The sandbox that the configuration asks for cannot be had on this machine."""


@functools.cache
def protection() -> Protection:
    """Builds a box with every protection, and one without a network, until one works."""
    program = shutil.which("bwrap")
    if program is None:
        return Protection(None, False, (_ABSENT,))
    reason = _probe(program, network=True)
    if reason is None:
        return Protection(program, True)
    if _probe(program, network=False) is None:
        return Protection(program, False, (f"no network namespace ({reason})",))
    return Protection(None, False, (f"bubblewrap cannot be used ({reason})",))


def wanted(config: RunConfig) -> Wanted:
    """What the run's configuration says."""
    rollout = config.rollout
    mode, paths = Mode(rollout.sandbox), tuple(rollout.sandbox_paths)
    return Wanted(mode, rollout.sandbox_require, paths, (config.run_dir,))


def steady() -> Protection:
    """`protection`, if it is not less than it was before on this machine: a program that uses up
    namespaces or processes must not get the next one started without a sandbox.

    Raises:
        SandboxError: it is less.
    """
    able, seen = protection(), _seen()
    most = seen.read_text() if seen.exists() else ""
    now = ("network" if able.network else "bubblewrap") if able.bubblewrap else ""
    ranks = {"": 0, "bubblewrap": 1, "network": 2}
    more = ranks[now] - ranks.get(most, 0)
    if more > 0:
        with contextlib.suppress(OSError):  # no cache: each process finds out for itself
            seen.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            seen.write_text(now)
    elif more < 0 and able.missing != (_ABSENT,):  # who takes bubblewrap away means it
        protection.cache_clear()  # the next try may find it well
        raise SandboxError(
            f"a sandbox worked before on this machine, and now: {'; '.join(able.missing)} (if that "
            f"is meant to be so, delete {seen})"
        )
    return able


def _seen() -> Path:
    """Remembers what worked on this machine."""
    return cache_root() / "sandbox" / machine()


def machine() -> str:
    """Names this machine, or container, until it is started anew."""
    boot = ""
    with contextlib.suppress(OSError):  # not every kernel has it (gVisor's)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Numbers of namespaces are given again, and a cache may be shared by machines.
    began = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    place = f"{socket.gethostname()}-{os.readlink('/proc/self/ns/mnt')[5:-1]}-{began}"
    return f"{boot}-{place}"


def for_graders(wanted: Wanted) -> dict[str, str]:
    """What the environment of a grader says, so that `prefix` and `room` know it."""
    return {_GRADERS: _REQUIRE if wanted.require else wanted.mode.value}


def _able_to_grade() -> Protection:
    said = os.environ.get(_GRADERS, Mode.AUTO.value)
    check(Wanted(require=True) if said == _REQUIRE else Wanted(Mode(said)))
    return steady()


def check(wanted: Wanted) -> str | None:
    """What a person must know of the sandbox on this machine, in one line; None if all is well.

    Raises:
        SandboxError: there is less than the configuration asks for.
    """
    if wanted.mode is Mode.NONE:
        return (
            "no sandbox (rollout.sandbox=none): harnesses read and write what this user can, "
            "and reach the network"
        )
    able = protection()
    if not able.missing:
        return None
    lack = "; ".join(able.missing)
    if wanted.require or (wanted.mode is Mode.BUBBLEWRAP and able.bubblewrap is None):
        asked = "sandbox_require=true" if wanted.require else "sandbox=bubblewrap"
        raise SandboxError(
            f"rollout.{asked}, but this machine cannot: {lack}. Install bubblewrap and allow user "
            f"namespaces ({hint()}), or set rollout.sandbox=none"
        )
    what = "harnesses reach the network" if able.bubblewrap else "harnesses run without a sandbox"
    return f"{what}: {lack} (rollout.sandbox_require=true refuses to run like this; {hint()})"


def hint() -> str:
    """Where to read what a sandbox needs; in a pod, also what its specification must say."""
    where = "docs/rollouts.md says what it needs"
    return f"{_POD}; {where}" if "KUBERNETES_SERVICE_HOST" in os.environ else where


def around(
    folder: Path, url: str, readable: Iterable[Path], wanted: Wanted
) -> tuple[Sandbox | None, str]:
    """The sandbox of an attempt whose places are below `folder`, or None; and what `url`, the
    gateway's, is called inside. `readable` is what it shows besides the system. In a sandbox the
    places are those of `IN_SANDBOX`.

    Raises:
        SandboxError: there is less than the configuration asks for.
    """
    if wanted.mode is Mode.NONE:
        return None, url
    able = steady()
    check(wanted)
    if able.bubblewrap is None:
        return None, url
    host, port, inside = _inside(url)
    outside, hosts = Places.below(folder), folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {host}\n")
    argv = [
        *_arguments(able.bubblewrap, able.network),
        *_mounts(
            shown={*readable, *map(Path, wanted.paths)},
            hidden=wanted.hidden,
            own=_bind("--bind", outside.workspace, IN_SANDBOX.workspace)
            | _bind("--bind", outside.home, IN_SANDBOX.home)
            | _bind("--bind", outside.tmp, IN_SANDBOX.tmp)
            | _bind("--ro-bind", outside.task_file, IN_SANDBOX.task_file)
            | _bind("--ro-bind", hosts, "/etc/hosts"),
        ),
    ]
    if not able.network:
        return Sandbox(tuple(argv), False), url
    return Sandbox(tuple(argv), True, (host, port)), inside


def prefix(folder: Path, readable: Iterable[Path], hidden: Iterable[Path] = ()) -> list[str]:
    """What stands before a command line, so that it runs in a sandbox without any network (where a
    box can have its own), in which it can write to `folder` only; nothing where this machine cannot
    make one. `hidden` folders are empty.

    Raises:
        SandboxError: there is less than the run's configuration asks for, or than there was before.
    """
    return _before(folder, _mounts(set(readable), hidden, _bind("--bind", folder)))


def room(folder: Path, shown: Iterable[Path], hidden: Iterable[Path] = ()) -> list[str]:
    """`prefix` for runs that must not learn of each other, nor fill a disk: of the system there is
    only what is in `shown`, and `folder` is in memory, of a limited size, but for the files that
    are in it.

    Raises:
        SandboxError: see `prefix`.
    """
    own = {folder: ["--size", str(_SCRATCH_BYTES), "--tmpfs", str(folder)]}
    for path in folder.iterdir():
        own |= {path: ["--dir", str(path)]} if path.is_dir() else _bind("--bind", path)
    return _before(folder, _mounts(set(shown), hidden, own, system=False))


def _before(folder: Path, mounts: Iterator[str]) -> list[str]:
    able = _able_to_grade()
    if able.bubblewrap is None:
        return []
    filtered = [sys.executable, "-I", "-S", "-B", syscalls.__file__]
    box = _arguments(able.bubblewrap, able.network)
    return [*filtered, *box, *mounts, "--chdir", str(folder), "--"]


def _arguments(program: str, network: bool) -> Iterator[str]:
    yield from (program, "--die-with-parent", "--new-session", "--cap-drop", "ALL")
    yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
    yield from ("--hostname", "sandbox", *(("--unshare-net",) if network else ()))
    # Read-only, because root inside may be root outside to /proc/sys.
    yield from ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")
    yield from ("--size", str(_SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev", "--symlink", "../tmp", "/var/tmp")


def _mounts(
    shown: Set[Path],
    hidden: Iterable[Path],
    own: Mapping[Path, list[str]],
    system: bool = True,
) -> Iterator[str]:
    """The system's folders and `shown`, read-only and without what is hidden, and `own`."""
    mounts = _system() if system else {}
    covers = list(_covered([Path.home(), *hidden], shown | mounts.keys()))
    mounts |= {path: ["--tmpfs", str(path)] for path in covers}
    for path in sorted(shown, key=_depth):
        above = max(mounts.keys() & {*path.parents}, key=_depth, default=None)
        if above is None or mounts[above][0] == "--tmpfs":  # else it is seen already
            mounts |= _bind("--ro-bind", path)
    mounts |= own
    for path in sorted(mounts, key=_depth):  # a folder before what lies in it
        yield from mounts[path]
    for path in (*covers, Path("/")):  # when all that is mounted in them has its place
        yield from ("--remount-ro", str(path))


def _system() -> dict[Path, list[str]]:
    mounts = {}
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            mounts[folder] = ["--symlink", os.readlink(folder), str(folder)]
        else:
            mounts |= _bind("--ro-bind", folder)
    for name in _ETC:
        mounts |= _bind("--ro-bind", Path("/etc") / name)
    return mounts


def _bind(how: str, path: str | Path, at: str | Path | None = None) -> dict[Path, list[str]]:
    """What mounts `path`, if it is there, in its own place or `at` another."""
    at = Path(at or path)
    return {at: [how, str(path), str(at)]} if os.path.exists(path) else {}


def _covered(hidden: Iterable[Path], shown: Set[Path]) -> Iterator[Path]:
    """Those folders that would be seen in one that is shown, unless they are asked for."""
    for path in hidden:
        real = path.resolve()
        if real.is_dir() and real not in shown and not shown.isdisjoint(real.parents):
            yield real


def _depth(path: Path) -> int:
    return len(path.parts)


def _inside(url: str) -> tuple[str, int, str]:
    """Host and port of `url`, and what it is called in a box, where everything is on loopback: a
    name stays as it is (it may be in a certificate), an address does not."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, port, url
    return host, port, parts._replace(netloc=f"127.0.0.1:{port}").geturl()


def _probe(program: str, network: bool) -> str | None:
    """Why a program cannot be run in a box; None if it can."""
    with tempfile.TemporaryDirectory(prefix="lr-probe-") as name:
        report = process.run(
            ["true"],
            env={"PATH": os.defpath},
            cwd=Path("/"),
            log=Path(name) / "log",
            limits=Limits(_PROBE_S),
            attempt_id=os.path.basename(name),
            sandbox=Sandbox((*_arguments(program, network), *_mounts(set(), (), {})), network),
        )
    if report.status == 0:
        return None
    said = re.sub(r"^(bwrap: |\[Errno \d+\] )", "", report.error or report.output_tail.strip())
    return said or report.describe()
