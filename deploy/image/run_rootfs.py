"""Run one command in a folder that holds a root file system, as a container runtime would: for check.py, as root.

The plan, one JSON object, is the only argument: root, user [uid, gid], folder, command, environment, volumes {here:
inside}. The command is process 1 of its own process numbers and has its own mounts: the root read-only, /tmp and
/dev/shm in memory, the volumes writable. It has no capability and cannot get any. SIGTERM and SIGINT are handed on to
it, its exit code is this program's, and it dies with this program. No runtime is asked for, so that this works where
there are neither control groups nor an overlay file system.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

NEW_MOUNTS, NEW_PROCESS_NUMBERS, NEW_IPC = 0x00020000, 0x20000000, 0x08000000
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
SET_DEATH_SIGNAL, DROP_FROM_BOUNDING_SET, SET_NO_NEW_PRIVILEGES = 1, 24, 38
DEVICES: Final = ("null", "zero", "full", "random", "urandom")
COULD_NOT_START: Final = 125

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the plan; returns the exit code of its command, or 128 and the signal that ended it."""
    plan = json.loads(sys.argv[1])
    checked("unshare", libc.unshare(NEW_MOUNTS | NEW_PROCESS_NUMBERS | NEW_IPC))
    child = os.fork()
    if child == 0:
        try:
            become(plan)
        except OSError as error:
            print(f"run_rootfs: {error}", file=sys.stderr, flush=True)
        os._exit(COULD_NOT_START)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def become(plan: dict[str, Any]) -> None:
    """Turn this process into the command. Returns only by an error.

    Raises:
        OSError: what could not be done.
    """
    root = plan["root"]
    mount("", "/", flags=RECURSIVE | PRIVATE)
    mount(root, root, flags=BIND | RECURSIVE)
    mount("proc", f"{root}/proc", kind="proc", flags=NO_SUID | NO_DEVICES)
    mount("tmpfs", f"{root}/dev", kind="tmpfs", flags=NO_SUID, data="mode=0755,size=64k")
    for device in DEVICES:
        Path(f"{root}/dev/{device}").touch()
        mount(f"/dev/{device}", f"{root}/dev/{device}", flags=BIND)
    for folder in (f"{root}/dev/shm", f"{root}/tmp"):
        Path(folder).mkdir(exist_ok=True)
        mount("tmpfs", folder, kind="tmpfs", flags=NO_SUID | NO_DEVICES, data="mode=1777")
    for here, inside in plan["volumes"].items():
        target = f"{root}{inside}"
        Path(target).mkdir(parents=True, exist_ok=True)
        mount(here, target, flags=BIND)
    mount("", root, flags=BIND | REMOUNT | READ_ONLY)
    os.chroot(root)
    os.chdir(plan["folder"])
    capability = 0
    while libc.prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0) == 0:
        capability += 1
    user, group = plan["user"]
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    checked("no new privileges", libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    checked("death signal", libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
    os.execvpe(plan["command"][0], plan["command"], plan["environment"])


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2).

    Raises:
        OSError: it is refused.
    """
    words = [word.encode() or None for word in (source, target, kind)]
    checked(f"mount {source or kind} at {target}", libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None))


def checked(what: str, result: int) -> None:
    """Raise OSError if a call of the C library failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
