"""Wrong: a file at import."""

from pathlib import Path

from .base import Listens, declared

Path(__file__).with_name("written.txt").write_text("here")


class WritesAFile(Listens):
    manifest = declared("writes-a-file")
