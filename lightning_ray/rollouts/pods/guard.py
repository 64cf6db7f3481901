"""Keeps the first process of a pod from what else runs there. It travels with `entry.py`, in front
of it, as one file: standard library only, for any Python from 3.8.

Who runs as the same user may read, trace and limit a process, capabilities or not. A process that
is not dumpable is not read or traced, and the first one of its namespace gets no signal from within
it. But prlimit(2) could set its CPU time to nothing, for which the kernel kills it, or its files to
none; and it could be made so idle that it never gets to end what runs too long. So a filter of
system calls, which every child inherits and none can take off, refuses these where they are aimed
at us.

Invariants: a call that is aimed at anybody else is let through; what cannot be had is said, and
stops nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_DUMPABLE, PR_SET_SECCOMP = 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2
# linux/seccomp.h: what a filter answers, and where it finds the call's number, architecture, and
# arguments, of which we want the lower half: a process id is no more than that.
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
# linux/bpf_common.h: load a word; and with a constant; copy to X and back; jump if equal; answer.
LOAD, AND, TO_X, FROM_X, JUMP_EQUAL, ANSWER = 0x20, 0x54, 0x07, 0x87, 0x15, 0x06
WITHOUT_X32 = 0xBFFFFFFF  # the bit of a call of x86-64 with short pointers
# linux/audit.h. A machine runs programs of its own architecture and of the older, shorter one.
ARCHITECTURES = {
    "x86_64": (0xC000003E, 0x40000003),
    "aarch64": (0xC00000B7, 0x40000028),
}
# Number of each call, by architecture: x86_64, i386, aarch64, arm.
CALLS = {
    "prlimit64": {0xC000003E: 302, 0x40000003: 340, 0xC00000B7: 261, 0x40000028: 369},
    "sched_setaffinity": {0xC000003E: 203, 0x40000003: 241, 0xC00000B7: 122, 0x40000028: 241},
    "sched_setscheduler": {0xC000003E: 144, 0x40000003: 156, 0xC00000B7: 119, 0x40000028: 156},
    "sched_setattr": {0xC000003E: 314, 0x40000003: 351, 0xC00000B7: 274, 0x40000028: 380},
    "setpriority": {0xC000003E: 141, 0x40000003: 97, 0xC00000B7: 140, 0x40000028: 97},
    "ioprio_set": {0xC000003E: 251, 0x40000003: 289, 0xC00000B7: 30, 0x40000028: 314},
}
USER = {"setpriority": 2, "ioprio_set": 3}  # first argument: all processes of a user


def guard() -> str:
    """Guards this process and filters the calls of all that it starts from here on; why there is no
    filter, or nothing. It must have one thread: another one has an id of its own."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return f"no filter of system calls is known for {machine}"
    # Without privileges to come nobody has to be one to set a filter.
    if prctl(PR_SET_NO_NEW_PRIVS, 1):
        return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
    code = ctypes.create_string_buffer(program(machine, os.getpid()))
    told = Filter(len(code) // 8, ctypes.addressof(code))
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(told)):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def program(machine: str, pid: int) -> bytes:
    """The filter that keeps `pid`."""
    code = []
    for architecture in ARCHITECTURES[machine]:
        rules = [step(LOAD, NUMBER), step(AND, WITHOUT_X32), step(TO_X)]
        for name, numbers in CALLS.items():
            first = [(0, USER[name]), (1, pid)] if name in USER else [(0, pid)]
            for argument, value in first:
                rules += [
                    step(FROM_X),
                    step(JUMP_EQUAL, numbers[architecture], 0, 3),
                    step(LOAD, ARGUMENTS + 8 * argument),
                    step(JUMP_EQUAL, value, 0, 1),
                    step(ANSWER, REFUSE),
                ]
        rules.append(step(ANSWER, ALLOW))
        code += [step(LOAD, ARCHITECTURE), step(JUMP_EQUAL, architecture, 0, len(rules)), *rules]
    return b"".join([*code, step(ANSWER, REFUSE)])


def step(code: int, value: int = 0, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)


def prctl(option: int, *values: int) -> int:
    wide = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0)[:4]]
    status: int = ctypes.CDLL(None, use_errno=True).prctl(option, *wide)
    return status
