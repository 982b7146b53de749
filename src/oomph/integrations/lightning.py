"""`Trainer(..., callbacks=[OomphCallback()])`. To predict: a function that calls fit."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from oomph.integrations.callbacks import DEFAULT_FILE, peaks, report_out_of_memory


class OomphCallback(Callback):
    """Logs peaks of memory every `every` batches; where memory runs out, writes the report to `file`."""

    def __init__(self, file: str = DEFAULT_FILE, every: int = 50) -> None:
        self.file, self.every = file, every

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        report_out_of_memory(self.file)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self.every == 0 and (found := peaks()):
            pl_module.log_dict(found)
