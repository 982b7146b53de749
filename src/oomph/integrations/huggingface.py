"""`Trainer(..., callbacks=[OomphCallback()])`. To predict a Trainer: `oomph.predict(trainer)`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from oomph.integrations.callbacks import DEFAULT_FILE, peaks, report_out_of_memory


class OomphCallback(TrainerCallback):
    """Adds peaks of memory to what the Trainer logs; where memory runs out, writes the report to `file`."""

    def __init__(self, file: str = DEFAULT_FILE) -> None:
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report_out_of_memory(self.file)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if logs is not None:
            logs.update(peaks())
