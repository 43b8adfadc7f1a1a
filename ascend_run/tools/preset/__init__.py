"""``ascend-run preset``: published models as configs, with a layout chosen for given devices."""

from typing import Final

SUMMARY: Final = "List published models; write a run's config for one, with a layout that fits."
