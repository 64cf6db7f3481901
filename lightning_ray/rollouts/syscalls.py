"""System calls that no program in a sandbox may make, held by a filter in the kernel (seccomp).

`install` puts the filter on the calling process and all that descend from it, for ever. As a
program, `python syscalls.py COMMAND...`, this file does so and becomes the command.

What is refused is what namespaces do not separate: the kernel's keyrings, its page cache as far as
a program can ask or say what is in it, and calls that do any of these in another way (io_uring,
those of 32-bit programs) or watch the machine (perf, bpf). One box could tell the next something by
them. Invariant: whoever cannot have the filter gets an OSError, and nothing runs without it.

Standard library only, and nothing of ours: the supervisor loads this file by its path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of BPF
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NONE, _NOT_LIKE_THAT = 0x00050000 | errno.ENOSYS, 0x00050000 | errno.EOPNOTSUPP
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # of x86_64: the same calls with other numbers
_EVERYWHERE = 0xFFFFFFFF
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NEVER = {  # numbers on x86_64 and aarch64
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "mincore": (27, 232), "cachestat": (451, 451), "process_madvise": (440, 440),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241),
}  # fmt: skip
# Which argument, what it must not be (`_EQUAL`) or have a bit of (`_ANY_BIT`), and the answer: of
# preadv2 what older kernels and file systems say, for which programs have another way.
_NEVER_WITH = {
    "fadvise64": ((221, 223), 3, _EQUAL, (4, 5), _REFUSE),  # POSIX_FADV_DONTNEED, ..._NOREUSE
    "madvise": ((28, 233), 2, _EQUAL, (20, 21), _REFUSE),  # MADV_COLD, MADV_PAGEOUT
    # RWF_NOWAIT, RWF_DONTCACHE, ...
    "preadv2": ((327, 286), 5, _ANY_BIT, (_EVERYWHERE,), _NOT_LIKE_THAT),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def install() -> None:
    """Raises OSError: there is no such filter on this machine."""
    code = assemble(os.uname().machine)
    program = _Program(len(code) // 8, code)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)  # else only root may install one
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def assemble(machine: str) -> bytes:
    """The filter as the kernel wants it. Raises OSError: it is not known for this machine."""
    if machine not in _MACHINES:
        raise OSError(f"there is no filter of system calls for {machine}")
    architecture, column = _MACHINES[machine]
    return b"".join(_instructions(architecture, column))


def _instructions(architecture: int, column: int) -> Iterator[bytes]:
    yield _one(_LOAD, _ARCHITECTURE)
    yield _one(_EQUAL, architecture, 1, 0)
    yield _one(_RETURN, _NONE)
    yield _one(_LOAD, _NUMBER)
    yield _one(_AT_LEAST, _X32, 0, 1)
    yield _one(_RETURN, _NONE)
    for numbers in _NEVER.values():
        yield _one(_EQUAL, numbers[column], 0, 1)
        yield _one(_RETURN, _REFUSE)
    for numbers, argument, test, values, answer in _NEVER_WITH.values():
        yield _one(_EQUAL, numbers[column], 0, len(values) + 3)
        yield _one(_LOAD, _ARGUMENTS + 8 * argument)  # its lower half: both are little endian
        for rest in range(len(values), 0, -1):
            yield _one(test, values[-rest], rest, 0)
        yield _one(_RETURN, _ALLOW)
        yield _one(_RETURN, answer)
    yield _one(_RETURN, _ALLOW)


def _one(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, other, value)


def _prctl(option: int, value: int, address: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(address), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no filter of system calls: {os.strerror(number)}")


if __name__ == "__main__":
    install()
    os.execvp(sys.argv[1], sys.argv[1:])
