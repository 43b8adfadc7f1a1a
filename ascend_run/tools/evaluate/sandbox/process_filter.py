"""A filter of system calls that lets threads be the only new processes of a program.

RLIMIT_NPROC does not hold for root. Interface: man 2 seccomp; Linux's linux/filter.h, audit.h.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

# Per processor: its AUDIT_ARCH, the number of clone, and what is refused with an error: fork,
# vfork, clone3 and unshare. Without clone3 glibc tries clone, whose flags a filter can see.
_CALLS: Final[dict[str, tuple[int, int, dict[int, int]]]] = {
    "x86_64": (
        0xC000003E,
        56,
        {57: errno.EAGAIN, 58: errno.EAGAIN, 435: errno.ENOSYS, 272: errno.EPERM},
    ),
    "aarch64": (0xC00000B7, 220, {435: errno.ENOSYS, 97: errno.EPERM}),
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
    arch, clone, refused = _CALLS[machine]
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, arch),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # another way to number the calls of x86_64
        (_ANSWER, 0, 0, _KILL),
    ]
    for number, why in refused.items():
        steps += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _ERROR | why)]
    steps += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),  # its flags
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_ANSWER, 0, 0, _ERROR | errno.EAGAIN),
        (_ANSWER, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
