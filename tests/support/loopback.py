"""Processes in a network of their own, with nothing but loopback.

Unlike ``no_network`` it holds for every process that the command starts, and for libraries in C.
As a script it becomes the command that follows it. Linux; interfaces: man 7 user_namespaces,
7 netdevice.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import pytest

_USER_AND_NETWORK: Final = 0x10000000 | 0x40000000
_SET_FLAGS, _UP = 0x8914, 1
_SHOWN: Final = "import socket; print([name for _, name in socket.if_nameindex()])"


def with_loopback_only(command: Sequence[str]) -> list[str]:
    """Return the command in a network of its own."""
    return [sys.executable, __file__, *command]


@pytest.fixture(scope="session")
def own_network() -> None:
    """Skip where the kernel allows no network of one's own."""
    shown = subprocess.run(
        with_loopback_only([sys.executable, "-c", _SHOWN]), capture_output=True, text=True
    )
    if shown.returncode:
        pytest.skip(f"no network of one's own here: {shown.stderr.strip()}")
    assert shown.stdout == "['lo']\n"


def main(command: Sequence[str]) -> NoReturn:
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_USER_AND_NETWORK):
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
