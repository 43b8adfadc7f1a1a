"""The version of the plugin API, compared with each manifest before its plugin is loaded."""

from __future__ import annotations

from typing import Final

API_VERSION: Final = 0
"""Provisional: hooks may still change. API 1 follows when every hook has two implementations."""
