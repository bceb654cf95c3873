"""The version of this software."""

from __future__ import annotations

VERSION = "0.1.0"
AGENT = f"sentinel-swarm/{VERSION}"
