"""Common base of the data modules that prepare a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_ptdp.checkpoint.remote_path import check_address
from lightning_ptdp.data.manifest import MANIFEST_FILE, Manifest, verify_store
from lightning_ptdp.data.prepare import Preparation, check_prepare, prepare
from lightning_ptdp.data.remote import fetch
from lightning_ptdp.data.stream_datamodule import StreamDataModule


class PreparedDataModule(StreamDataModule):
    """Batches of a folder that the first training process prepares or copies.

    Args:
        prepare_config: Configuration of the preparation.
        remote: Address of a prepared folder to copy instead.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``.
    """

    def __init__(
        self,
        *,
        prepare_config: Preparation,
        remote: str | None = None,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.prepare_config = prepare_config
        self.data_dir = Path(prepare_config.output)
        self.remote = remote
        self.verify_hashes = verify_hashes

    def check(self, *, num_replicas: int = 1) -> None:
        """Check source and folder before a process is started; write nothing.

        If the data are already prepared, check also that they hold the samples of a step of
        ``num_replicas`` replicas.

        Raises:
            DataError: See ``check_prepare`` and ``TokenLoader``.
            ValueError: The batch sizes do not divide for this number of replicas.
        """
        self.batch_plans(num_replicas=num_replicas)
        if self.remote is not None:
            available = self.data_dir.exists()
            if not available:
                check_address(f"{self.remote.rstrip('/')}/{MANIFEST_FILE}")
        else:
            available = check_prepare(self.prepare_config, hashes=self.verify_hashes) is not None
        if available:
            super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Prepare or copy ``data_dir``; Lightning calls this in one process per node.

        Raises:
            DataError: See ``prepare`` and ``fetch``.
        """
        if self.remote is not None:
            fetch(self.remote, self.data_dir, hashes=self.verify_hashes)
        else:
            prepare(self.prepare_config, hashes=self.verify_hashes)

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` matches its manifest.

        Raises:
            DataError: It does not match.
        """
        verify_store(self.data_dir, hashes=False)

    def _places(self) -> list[str]:
        return [str(self.data_dir)]

    def _text(self) -> list[str]:
        return Manifest.read(self.data_dir).corpus.source
