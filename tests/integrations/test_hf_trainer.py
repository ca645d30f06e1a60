"""The real Hugging Face `Trainer`: it takes whole updates ahead, and skips batches by number on a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.integrations import as_dataloader
from stoker.loader import Loader
from stoker.store import Cache
from tests.integrations.passes import EPOCHS, make_cache, make_varied_cache, sequence

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'stoker[trainers]'")
transformers = pytest.importorskip(  # after accelerate: it takes longest, and is of no use alone
    "transformers", reason="transformers is not installed: pip install 'stoker[trainers]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the trainer are not ours to mend


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    transformers.logging.set_verbosity_error()
    return make_cache(tmp_path_factory.mktemp("c"))


class Mean(torch.nn.Module):
    """Learns the mean of a field."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(3))

    def forward(self, bc: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": ((bc - self.mean) ** 2).mean()}


class Trainer(transformers.Trainer):
    """Takes its batches from a loader, and notes them."""

    def __init__(self, loader: Loader, folder: Path, **settings: Any) -> None:
        self.loader = loader
        self.seen: list[list[int]] = []
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=loader.batch_size,
            use_cpu=True,
            report_to=[],
            save_strategy="steps",
            save_steps=1,
            disable_tqdm=True,
            learning_rate=0.1,
            **settings,
        )
        super().__init__(model=Mean(), args=arguments)

    def get_train_dataloader(self) -> Any:
        return as_dataloader(self.loader)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(inputs["index"].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def fit(cache: Cache, folder: Path, *, resume: Path | None = None, **settings: Any) -> Trainer:
    trainer = Trainer(Loader(cache, batch_size=5, seed=3, shuffle=True), folder, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("batches", [1, 2], ids=["", "accumulated"])
def test_a_run_resumed_after_any_update_goes_on_as_if_unbroken(
    cache: Cache, tmp_path: Path, batches: int
) -> None:
    settings = {"gradient_accumulation_steps": batches}
    whole = fit(cache, tmp_path / "whole", **settings)
    assert whole.seen == sequence(Loader(cache, batch_size=5, seed=3, shuffle=True))

    updates = -(-len(Loader(cache, batch_size=5, shuffle=True)) // batches)
    for step in range(1, EPOCHS * updates, 3):
        resumed = fit(cache, tmp_path / "again", resume=tmp_path / "whole" / f"checkpoint-{step}", **settings)

        trained = step // updates * 5 + step % updates * batches
        assert resumed.seen == whole.seen[trained:]
        assert torch.equal(resumed.model.mean, whole.model.mean)


@pytest.mark.parametrize("setting", [{"batch_by": "kind", "batch_size": 4}, {"batch_tokens": 9}], ids=str)
def test_a_run_trains_on_batches_of_varying_size_and_resumes(tmp_path: Path, setting: dict[str, Any]) -> None:
    cache = make_varied_cache(tmp_path)

    def fit_varied(folder: str, resume: str | None = None) -> Trainer:
        trainer = Trainer(Loader(cache, seed=3, shuffle=True, **setting), tmp_path / folder)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = fit_varied("whole")
    assert whole.seen == sequence(Loader(cache, seed=3, shuffle=True, **setting))

    for step in range(1, len(whole.seen), 5):
        resumed = fit_varied("again", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert resumed.seen == whole.seen[step:]
        assert torch.equal(resumed.model.mean, whole.model.mean)
