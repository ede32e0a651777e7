"""Callbacks for training frameworks: the ranges that recordings have of a run, and what is armed while it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cudatool as ct
from cudatool.callbacks._steps import TrainingSteps
from cudatool.errors import UsageError
from cudatool.trace import hooks, reader
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace


def ranges(trace: Trace) -> list[str]:
    """Return the names of the ranges, each of which must have ended before the next began."""
    rows = trace.of_kind(Kind.RANGE_PUSH, Kind.RANGE_POP)
    assert [Kind.RANGE_PUSH, Kind.RANGE_POP] * (len(rows) // 2) == rows["kind"].tolist()
    return [trace.names[name] for name in rows["name"][::2]]


def test_what_begins_ends_what_was_open(tmp_path: Path) -> None:
    steps = TrainingSteps(False, {})
    with ct.record(tmp_path / "run.ctrace"):
        steps.start()
        steps.begin("step 1")
        steps.begin("step 2")  # the first failed
        steps.end()
        steps.end()
        steps.begin("step 3")
        steps.stop()
    assert ["step 1", "step 2", "step 3"] == ranges(reader.read(tmp_path / "run.ctrace"))


def test_process_is_armed_from_start_to_stop(tmp_path: Path) -> None:
    steps = TrainingSteps(True, {"directory": str(tmp_path), "name": "job", "on_oom": False})
    steps.start()
    steps.start()
    steps.begin("step 1")
    assert 1 == len(ct.trigger("why"))
    steps.stop()
    assert [] == ct.trigger("why")
    assert not hooks.active
    (path,) = tmp_path.glob("job.*.ctrace")
    assert "step 1" in reader.read(path).names


def test_recorded_process_is_not_armed(tmp_path: Path) -> None:
    steps = TrainingSteps(True, {"directory": str(tmp_path)})
    with ct.record(tmp_path / "run.ctrace"):
        steps.start()
        assert [] == ct.trigger("why")
        steps.stop()


def test_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="nonsense"):
        TrainingSteps(True, {"nonsense": 1})


@pytest.mark.filterwarnings("default")  # the frameworks' own
def test_trainer_of_transformers_names_its_steps(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from cudatool.callbacks.transformers import MemoryCallback

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.tensor(i % 2)} for i in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        transformers.BertForSequenceClassification(config),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[MemoryCallback()],
    )
    with ct.record(tmp_path / "run.ctrace"):
        trainer.train()
    assert ["step 1", "step 2", "evaluate", "step 3"] == ranges(reader.read(tmp_path / "run.ctrace"))[:4]


@pytest.mark.filterwarnings("default")  # the frameworks' own
def test_trainer_of_lightning_names_its_batches(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from cudatool.callbacks.lightning import MemoryCallback

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.layer, self.fails = torch.nn.Linear(8, 1), fails

        def training_step(self, batch: Any, index: int) -> Any:
            if self.fails:
                raise RuntimeError("as it is meant to")
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-2)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 8)), batch_size=4)

    def fit(fails: bool) -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        callback = MemoryCallback(directory=str(tmp_path), name="job", on_oom=False)
        trainer = lightning.Trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[callback], **quiet)
        trainer.fit(Model(fails), data, data)

    with ct.record(tmp_path / "run.ctrace"):
        fit(fails=False)
    validated = ["validate 1", "validate 2"]
    expected = ["step 1", "step 2", *validated, "step 3", "step 4", *validated]
    assert expected == ranges(reader.read(tmp_path / "run.ctrace"))
    with pytest.raises(RuntimeError, match="as it is meant to"):
        fit(fails=True)
    assert [] == ct.trigger("why")
