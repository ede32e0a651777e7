"""A callback for Lightning's Trainer (the package lightning, or pytorch_lightning).

::

    from cudatool.callbacks.lightning import MemoryCallback

    trainer = Trainer(max_epochs=3, callbacks=[MemoryCallback()])
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    from pytorch_lightning.callbacks import Callback

from cudatool.callbacks._steps import TrainingSteps

__all__ = ["MemoryCallback"]


class MemoryCallback(Callback):  # type: ignore[misc]  # no types are known where lightning is not installed
    """Names the batches of a run in recordings, and arms the process while it lasts.

    ``step 12`` is the twelfth training batch of the run, over all epochs; batches of validation, test and prediction
    are ``validate 3`` and so on. Recordings show them, ``cudatool leaks`` counts by them, and
    ``cudatool run --range step:10-20`` records some of them. When memory runs out, a report says who held it, also in a
    program that is not recorded (:func:`cudatool.arm`).

    Parameters
    ----------
    arm
        False arms nothing. A process that is being recorded is not armed, too: its recording has more.
    options
        Of :func:`cudatool.arm`: what to keep and when to write it.

    Raises
    ------
    UsageError
        There is no such option.
    """

    def __init__(self, *, arm: bool = True, **options: Any) -> None:
        self._steps = TrainingSteps(arm, options)
        self._batches = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Arm the process."""
        self._steps.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Open the range of a training batch."""
        self._batches += 1
        self._steps.begin(f"step {self._batches}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close it."""
        self._steps.end()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """Open the range of a batch of the validation."""
        self._steps.begin(f"validate {batch_idx + 1}")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        """Close it."""
        self._steps.end()

    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """Open the range of a batch of the test."""
        self._steps.begin(f"test {batch_idx + 1}")

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        """Close it."""
        self._steps.end()

    def on_predict_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        """Open the range of a batch of the prediction."""
        self._steps.begin(f"predict {batch_idx + 1}")

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        """Close it."""
        self._steps.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep events no longer: the run has failed."""
        self._steps.stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Keep events no longer."""
        self._steps.stop()
