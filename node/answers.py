"""What every node answers, whoever asks: the manifest, the claims and findings that it knows, its status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from node.dialback import DialBacks
from node.http import finite
from protocol.errors import LocalError
from protocol.fields import encode
from protocol.messages import MAX_RECORDS, Method, Push
from protocol.transports.base import Request, Response, Route

if TYPE_CHECKING:
    from node.daemon import Node

MAX_VIEW_BYTES = 200_000
"""Of the records in one answer, which has to fit the head of a frame."""


class Answers:
    """The methods that are open to strangers."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def serve(self) -> None:
        """Answer from now on."""
        transport = self._node.network.transport
        transport.serve(Method.MANIFEST, Route(handler=self._manifest))
        transport.serve(Method.VIEW, Route(handler=self._view))
        transport.serve(Method.STATUS, Route(handler=self._status))
        transport.serve(Method.DIAL_BACK, Route(handler=DialBacks().serve))

    async def _manifest(self, request: Request) -> Response:
        if self._node.manifest is None:
            raise LocalError("this node has no manifest yet")
        return Response(body=(self._node.manifest.to_bytes(),))

    async def _view(self, request: Request) -> Response:
        membership = self._node.membership
        records: list[bytes] = []
        size = 0
        for data in membership.view.records() if membership is not None else ():
            size += len(data) + 8
            if len(records) >= MAX_RECORDS or size > MAX_VIEW_BYTES:
                break
            records.append(data)
        return Response(head=encode(Push(records=tuple(records))))

    async def _status(self, request: Request) -> Response:
        status = finite(self._node.status(brief=True))
        return Response(body=(json.dumps(status, allow_nan=False).encode(),))
