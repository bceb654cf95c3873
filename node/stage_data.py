"""The data that the first stage reads: opened once, and whether this machine has them at all."""

from __future__ import annotations

import asyncio

from node.data import TokenStream, open_source
from node.documents import read_documents
from node.tokenizer import load_tokenizer
from protocol.errors import DataSourceError
from protocol.manifest import Manifest


class StageData:
    """Opens the manifest's data when they are needed."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.stream: TokenStream | None = None
        """None until they have been opened."""

    async def open(self) -> TokenStream:
        """Read and tokenise the data, the first time.

        Raises:
            DataSourceError: they are not here, or too few.
        """
        if self.stream is None:
            stream = await asyncio.to_thread(self._open)
            if stream.windows(self._manifest.model.context) == 0:
                raise DataSourceError(
                    f"data.source: {self._manifest.data.source} holds {len(stream)} tokens, fewer than one sequence of "
                    f"{self._manifest.model.context + 1}; use more data"
                )
            self.stream = stream
        return self.stream

    async def unfit(self, pinned: int | None) -> dict[int, str]:
        """Stages that this node cannot hold, and why: the first one, where it cannot read the data.

        Raises:
            SentinelError: as above, where the volunteer asks for the first stage.
        """
        try:
            if pinned == 0:
                await self.open()
            else:
                await asyncio.to_thread(lambda: next(read_documents(self._manifest.data), None))
        except DataSourceError as error:
            if pinned == 0:
                raise
            return {0: str(error)}
        return {}

    def _open(self) -> TokenStream:
        manifest = self._manifest
        return open_source(
            manifest.data,
            load_tokenizer(manifest.data.tokenizer, manifest.data.tokenizer_sha256),
            vocab_size=manifest.model.vocab_size,
            sequences_per_step=manifest.training.sequences_per_step,
        )
