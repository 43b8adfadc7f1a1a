"""Secret key of a run's rendezvous. Imports no torch."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

import attrs

TAG_BYTES: Final = hashlib.sha256().digest_size
_MIN_CHARACTERS: Final = 32
_MIN_DIFFERENT: Final = 8
_MAX_BYTES: Final = 4096
_HOW_TO_MAKE: Final = "make one with: (umask 077; openssl rand -hex 32 > {path})"


@attrs.frozen(repr=False)
class RendezvousKey:
    """The shared secret of one run's nodes."""

    _secret: bytes

    @classmethod
    def random(cls) -> RendezvousKey:
        """Generate a key for a run on one machine."""
        return cls(secrets.token_bytes(TAG_BYTES))

    @classmethod
    def read(cls, path: Path) -> RendezvousKey:
        """Read the key file, which every node has.

        Raises:
            ValueError: The file cannot be read, is too short, or is readable by other users.
        """
        try:
            with path.open("rb") as stream:
                found = os.fstat(stream.fileno())
                content = stream.read(_MAX_BYTES).strip()
        except OSError as error:
            how = _HOW_TO_MAKE.format(path=path)
            raise ValueError(f"{path}: {error.strerror or error}; {how}") from None
        if len(content) < _MIN_CHARACTERS or len(set(content)) < _MIN_DIFFERENT:
            how = _HOW_TO_MAKE.format(path=path)
            raise ValueError(
                f"{path} has {len(content)} characters, {len(set(content))} of them different; a "
                f"key has at least {_MIN_CHARACTERS} and {_MIN_DIFFERENT}; {how}"
            )
        if found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise ValueError(
                f"{path} has mode {found.st_mode & 0o777:o} and owner {found.st_uid}, so other "
                f"users can read or change it; make a copy of your own: install -m 600 {path} KEY"
            )
        return cls(content)

    def run_id(self) -> str:
        """Return a run name that only holders of the key can compute."""
        return hmac.digest(self._secret, b"run id", "sha256").hex()

    def seal(self, content: bytes) -> bytes:
        """Prefix ``content`` with its HMAC-SHA256."""
        return self._tag(content) + content

    def open(self, sealed: bytes) -> bytes:
        """Return the content of the result of ``seal``.

        Raises:
            ValueError: The tag was not made with this key.
        """
        tag, content = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(content)):
            raise ValueError("its HMAC does not match this run's key")
        return content

    def _tag(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, b"content" + content, "sha256")
