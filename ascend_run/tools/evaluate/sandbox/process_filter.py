"""A filter of system calls: what the limits of a process do not hold is refused.

- New processes, threads apart: RLIMIT_NPROC does not hold for root.
- Memory that is in no address space, of which RLIMIT_AS knows nothing: System V's shared memory,
  semaphores and messages, files without a name, keys, and what BPF, io_uring and perf allocate.
- Parts of the kernel that no program of a benchmark needs: keys are of no namespace.

Interface: man 2 seccomp; Linux's linux/filter.h, audit.h, asm/unistd_64.h, asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
# Without clone3 glibc tries clone, whose flags a filter can see.
_ERRORS: Final = {"fork": errno.EAGAIN, "vfork": errno.EAGAIN, "clone3": errno.ENOSYS}
"""Of a refused call; EPERM of the others."""
# Call -> its number of x86_64, and that of aarch64, which lacks two of them.
_REFUSED: Final[dict[str, tuple[int, int | None]]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone3": (435, 435),
    "unshare": (272, 97),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _ANSWER = 0x20, 0x15, 0x45, 0x35, 0x06
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_CLONE_THREAD: Final = 0x00010000


def process_filter(machine: str) -> bytes:
    """Return its instructions, 8 bytes each.

    Args:
        machine: Processor, as ``os.uname`` names it.

    Raises:
        KeyError: It is unknown.
    """
    arch, clone = _ARCH[machine], _CLONE[machine]
    column = [*_ARCH].index(machine)
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, arch),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # another way to number the calls of x86_64
        (_ANSWER, 0, 0, _KILL),
    ]
    for name, numbers in _REFUSED.items():
        if (number := numbers[column]) is not None:
            why = _ERRORS.get(name, errno.EPERM)
            steps += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _ERROR | why)]
    steps += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),  # its flags
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_ANSWER, 0, 0, _ERROR | errno.EAGAIN),
        (_ANSWER, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
