"""Try out a built image: run nodes from it, and check what docs/deploy.md promises. build-test.sh runs this, as root.

Needs Linux and Python alone. Prints a line for each thing that holds; the first that does not is the last line, with
the end of the container's log, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from containers import GRACE_SECONDS, CheckError, Container, Image

PYTHON: Final = "/opt/sentinel/bin/python"
TRAIN_SECONDS: Final = 300.0
LEASE_SECONDS: Final = 90.0
"""A claim lives 30 s; the rest is for a slow machine."""
NO_CAPABILITIES: Final = "0000000000000000"
LOOPBACK: Final = ("--host", "127.0.0.1", "--no-reach")
SECRETS: Final = re.compile(r"password|secret|token|api_?key|private.?key", re.IGNORECASE)
"""Words that have no place in an image's environment or history."""
SECRET_FILES: Final = ("*.key", "pip.conf", ".netrc", ".pypirc", ".git", ".env", "id_rsa", "id_ed25519")
PARTS: Final = """
import importlib, pkgutil
import node, protocol, verifier
names = {found.name for package in (verifier, protocol, node)
         for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")}
# py-libp2p and hivemind cannot share a process, and the last one runs the node.
names -= {"protocol.light", "node.observing.asking", "node.observing.watching", "node.export_live", "node.__main__"}
for name in sorted(names):
    importlib.import_module(name)
import pyarrow, pyarrow.parquet as parquet
parquet.write_table(pyarrow.table({"text": ["some", "words"]}), "/tmp/words.parquet")
assert parquet.read_table("/tmp/words.parquet").num_rows == 2
print(len(names))
"""


def main() -> int:
    """Check the image; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder where the image is mounted")
    parser.add_argument("--config", type=Path, required=True, help="what `buildah inspect --type image` printed")
    parser.add_argument("--canary", required=True, help="a word that the build was given in secret")
    options = parser.parse_args()
    description = json.loads(options.config.read_text(encoding="utf-8"))
    image_description = json.loads(description["Config"])
    with tempfile.TemporaryDirectory(prefix="sentinel-check-") as work:
        os.chmod(work, 0o755)
        image = Image(options.root, image_description["config"], Path(work))
        try:
            the_configuration(image.config)
            no_secret(image, image_description, options.canary)
            the_commands(image)
            the_swarm(image)
        except CheckError as error:
            print(f"FAILED: {error}", flush=True)
            return 1
        finally:
            for container in image.containers:
                container.kill()
    return 0


def the_configuration(config: dict[str, Any]) -> None:
    """User, entry point, signal, volume, health check, labels."""
    user = str(config.get("User", ""))
    expect(re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) is not None, f"it runs as user {user}, which is not root")
    expect(config.get("Entrypoint") == ["sentinel"], "sentinel is started without a shell")
    expect(config.get("StopSignal") == "SIGTERM", "it is stopped by SIGTERM")
    expect(list(config.get("Volumes") or ()) == ["/data"], "its one volume is /data")
    expect(config.get("Healthcheck", {}).get("Test", [""])[0] == "CMD", "it has a health check without a shell")
    labels = [name for name in config.get("Labels") or () if name.startswith("org.opencontainers.image.")]
    expect(len(labels) >= 4, f"it has {len(labels)} labels")


def no_secret(image: Image, description: dict[str, Any], canary: str) -> None:
    """Nothing in the image was given to the build in secret, or looks as if it had been."""
    words = [*image.config["Env"], *(entry.get("created_by", "") for entry in description["history"])]
    found = [word for word in words if SECRETS.search(word) or canary in word]
    expect(not found, f"no secret in {len(words)} lines of environment and history")
    expect(canary not in json.dumps(description), "nor anywhere else in its description")
    named = [path for pattern in SECRET_FILES for path in image.root.rglob(pattern) if path.is_file()]
    expect(not named, f"no file of it is a key or holds pip's settings {named or ''}".rstrip())
    grep = subprocess.run(["grep", "-rlF", canary, str(image.root)], capture_output=True, text=True, check=False)
    expect(grep.returncode == 1, f"no file of it holds what the build was told in secret {grep.stdout}".rstrip())


def the_commands(image: Image) -> None:
    """What needs no swarm."""
    said = image.run(["--help"])
    expect("Usage: sentinel" in said, "sentinel --help")
    tell(image.run(["--version"]).strip())
    if re.search(r"^  doctor\b", said, re.MULTILINE):
        tell(image.run(["doctor"], volumes={image.volume("doctor"): "/data"}).strip())
    count = image.run(["-c", PARTS], entrypoint=[PYTHON]).strip().splitlines()[-1]
    image.run(["-c", "import protocol.light, node.observing.asking"], entrypoint=[PYTHON])
    tell(f"{count} modules can be imported, and parquet can be read")
    said = image.run(["-c", "open('/run/sentinel/new', 'w')"], entrypoint=[PYTHON], code=1)
    expect("Read-only file system" in said, "all this on a read-only root")
    said = image.run(["join"], code=2)
    expect("an invite is needed" in said, "without an invite it says so and ends with code 2")


def the_swarm(image: Image) -> None:
    """A coordinator and two nodes, of which one is stopped and comes back."""
    manifest, invite, home = image.volume("manifest"), image.volume("invite"), image.volume("coordinator")
    tiny = ["--stages", "2", "--layers", "2", "--width", "64", "--heads", "4", "--kv-heads", "2"]
    image.run(["init", "/manifest/swarm.toml", "--name", "image-test", *tiny], volumes={manifest: "/manifest"})
    coordinator = image.start(
        "coordinator",
        ["coordinate", "/manifest/swarm.toml", *LOOPBACK],
        volumes={manifest: "/manifest", invite: "/run/sentinel", home: "/data"},
        environment={"SENTINEL_INVITE_FILE": "/run/sentinel/invite"},
    )
    coordinator.until_status(lambda status: status["state"] == "waiting", "coordinating", TRAIN_SECONDS)
    expect((invite / "invite").read_text().startswith("sentinel://"), "the coordinator left its invite in a file")
    homes = {stage: image.volume(f"node{stage}") for stage in (0, 1)}
    nodes = {stage: join(image, stage, homes[stage], invite) for stage in homes}
    peers = {stage: trained(node, steps=2)["peer"] for stage, node in nodes.items()}
    tell("two nodes have trained two steps")
    unprivileged(image, nodes[0])
    healthy(image, nodes[0])
    said = image.run(
        ["status"], volumes={invite: "/run/sentinel"}, environment={"SENTINEL_INVITE_FILE": "/run/sentinel/invite"}
    )
    expect("stage 0: 1 replica" in said and "stage 1: 1 replica" in said, "sentinel status sees both")

    left(nodes[1], "the node of stage 1")
    nodes[0].until_status(
        lambda status: all(replica["peer"] != peers[1] for replica in status["replicas"]),
        "seeing it gone",
        LEASE_SECONDS,
    )
    tell("its claim is gone from the other node's view")
    nodes[1] = join(image, 1, homes[1], invite)
    again = trained(nodes[1], steps=2)
    expect(again["peer"] == peers[1], f"started again on its volume it is the same node, {peers[1][-8:]}")
    expect((homes[1] / "identity.key").stat().st_mode & 0o777 == 0o600, "its key is readable by itself alone")

    early = join(image, 1, image.volume("early"), invite)
    early.until(lambda: True if heeds_sigterm(early.facts()) else None, "getting ready for SIGTERM", GRACE_SECONDS)
    left(early, "a node that was just being started")
    for stage, node in nodes.items():
        left(node, f"the node of stage {stage}")
    left(coordinator, "the coordinator")


def join(image: Image, stage: int, home: Path, invite: Path) -> Container:
    """Start a node as a volunteer does: the invite from a file, nothing secret in the arguments."""
    return image.start(
        f"stage{stage}",
        ["join", *LOOPBACK, "--stage", str(stage), "--device", "cpu", "--threads", "1"],
        volumes={home: "/data", invite: "/run/sentinel"},
        environment={"SENTINEL_INVITE_FILE": "/run/sentinel/invite"},
    )


def trained(node: Container, *, steps: int) -> dict[str, Any]:
    """Its status, once it has taken part in so many steps."""
    return node.until_status(
        lambda status: bool(status["contribution"]["steps"] >= steps), f"{steps} steps of training", TRAIN_SECONDS
    )


def unprivileged(image: Image, node: Container) -> None:
    """The kernel's word on who the node is and what it may do."""
    facts = node.facts()
    uid = str(image.user[0])
    expect(set(facts["Uid"].split()) == {uid} and facts["NSpid"].split()[-1] == "1", f"process 1 has user id {uid}")
    names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    expect(all(facts[name] == NO_CAPABILITIES for name in names), "it has no capability")


def healthy(image: Image, node: Container) -> None:
    """The image's own health check, on a node that runs and on a port that nobody serves."""
    check = image.config["Healthcheck"]["Test"][1:]
    port = node.page().rsplit(":", 1)[1]
    for path in ([], ["/readyz"]):
        image.run(path, entrypoint=check, environment={"SENTINEL_HTTP_PORT": port})
    image.run([], entrypoint=check, environment={"SENTINEL_HTTP_PORT": "9"}, code=1)
    tell("the health check tells a live node from none")


def left(node: Container, what: str) -> None:
    """Stop it; it has to end by itself, in time and well."""
    code, seconds = node.stop()
    expect(code == 0, f"{what} left {seconds:.1f} s after SIGTERM with code {code}")


def heeds_sigterm(facts: dict[str, str]) -> bool:
    """Whether the process has a handler for SIGTERM."""
    return bool(int(facts.get("SigCgt", "0"), 16) & 1 << (signal.SIGTERM - 1))


def expect(holds: bool, what: str) -> None:
    """Tell what holds, or end the check."""
    if not holds:
        raise CheckError(f"it does not hold that {what}")
    tell(what)


def tell(what: str) -> None:
    """One line, at once."""
    print(f"ok: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
