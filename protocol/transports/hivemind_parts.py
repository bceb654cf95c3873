"""The parts of hivemind that are used here, without the rest of it.

``import hivemind`` also imports its optimizers, averagers and expert servers, with SciPy: about 50 MiB and
0.6 s in every node, for nothing. So the subpackages are imported below a bare package object. Where the
whole of hivemind has been imported already, that one is used.
"""

from __future__ import annotations

import importlib.util
import sys
import types


def _bare_package() -> None:
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("hivemind is not installed; run `make install`")
    package = types.ModuleType("hivemind", "A bare package: see protocol/transports/hivemind_parts.py.")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["hivemind"] = package


_bare_package()

from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import (  # noqa: E402
    ControlFailure,
    P2PDaemonError,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "ControlFailure",
    "DHTNode",
    "DHTRecord",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]
