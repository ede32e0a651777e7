"""A callback for the Trainer of Hugging Face's transformers.

::

    from cudatool.callbacks.transformers import MemoryCallback

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[MemoryCallback()])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from cudatool.callbacks._steps import TrainingSteps

__all__ = ["MemoryCallback"]


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # no types are known where transformers is not installed
    """Names the steps of a training run in recordings, and arms the process while it lasts.

    ``step 12`` is the twelfth step of the optimizer with all its micro-batches, ``evaluate`` an evaluation. Recordings
    show them, ``cudatool leaks`` counts by them, and ``cudatool run --range step:10-20`` records some of them. When
    memory runs out, a report says who held it, also in a program that is not recorded (:func:`cudatool.arm`).

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Arm the process."""
        self._steps.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Open the range of the step. It is called once for all micro-batches of a step."""
        self._steps.begin(f"step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close it."""
        self._steps.end()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Name the rest of an evaluation, of which transformers tells no beginning."""
        if not self._steps.is_open:
            self._steps.begin("evaluate")

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the range of the evaluation."""
        self._steps.end()

    def on_predict(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the range of a prediction."""
        self._steps.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Keep events no longer."""
        self._steps.stop()
