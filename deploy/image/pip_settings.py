"""Write pip's settings on this machine as one pip.conf, and print what to mount for it, as HERE:THERE:ro.

So a build in a container finds packages as pip here does: build-test.sh hands it the file as a secret, and mounts the
local files and folders that the settings name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

WANTED = ("cert", "extra-index-url", "find-links", "index-url", "no-index", "proxy", "timeout", "trusted-host")
"""Settings of how packages are found. What is pinned, cached or printed is not this machine's to say."""


MOUNTED_AT = "/mnt/pip"


def main() -> int:
    """``pip_settings.py FILE``; returns the exit code."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    text, mounts = pip_conf(settings(said))
    target = Path(sys.argv[1])
    target.touch(mode=0o600)
    target.write_text(text, encoding="utf-8")
    for here, there in mounts.items():
        print(f"{here}:{there}:ro")
    return 0


def settings(listing: str) -> dict[str, str]:
    """The wanted settings in what ``pip config list`` printed; the environment's come over those of files."""
    values: dict[str, str] = {}
    from_environment: dict[str, str] = {}
    for line in listing.splitlines():
        if not (found := re.fullmatch(r"(global|install|:env:)\.([a-z-]+)=(.*)", line)):
            continue
        section, name, value = found.groups()
        name = "timeout" if name == "default-timeout" else name
        if name in WANTED:
            (from_environment if section == ":env:" else values)[name] = str(ast.literal_eval(value))
    return values | from_environment


def pip_conf(values: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The settings as a pip.conf in which local paths are those below MOUNTED_AT, and which of them is which."""
    mounts: dict[str, str] = {}

    def moved(word: str) -> str:
        scheme = "file://" if word.startswith("file://") else ""
        path = Path(word.removeprefix(scheme))
        if not path.is_absolute() or not path.exists():
            return word
        # A folder that serves as index points to files beside itself.
        source, rest = (path.parent, path.name) if scheme else (path, "")
        there = mounts.setdefault(str(source), f"{MOUNTED_AT}/{len(mounts)}")
        return f"{scheme}{there}/{rest}" if rest else f"{scheme}{there}"

    lines = ["[global]"]
    for name, value in sorted(values.items()):
        lines.append(f"{name} = " + "\n    ".join(moved(word) for word in value.split()))
    return "\n".join(lines) + "\n", mounts


if __name__ == "__main__":
    sys.exit(main())
