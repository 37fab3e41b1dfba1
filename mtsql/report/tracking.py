"""Metrics in a tracker beside metrics.csv: TensorBoard or Weights & Biases, imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from mtsql.errors import UserError

Track: TypeAlias = Callable[[int, Mapping[str, float]], None]  # a step and its figures


def open_tracker(name: str, log: Path, resume_step: int) -> Track | None:
    """The function that sends a row of the file `log` to a tracker; None for "none".

    TensorBoard's files go into a folder beside `log`; Weights & Biases takes its key from its own
    environment. Raises UserError if its package is not installed.
    """
    if name == "none":
        return None
    if name == "tensorboard":
        _need("tensorboard")
        folder = log.parent / "tensorboard" / log.stem
        writer = _need("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=resume_step)

        def to_tensorboard(step: int, row: Mapping[str, float]) -> None:
            for figure, value in row.items():
                writer.add_scalar(figure, value, step)
            writer.flush()

        return to_tensorboard
    wandb = _need("wandb")
    run = wandb.run or wandb.init(project="mtsql", name=log.parent.name, dir=str(log.parent))

    def to_wandb(step: int, row: Mapping[str, float]) -> None:
        run.log({f"{log.stem}/{figure}": value for figure, value in row.items()}, step=step)

    return to_wandb


def _need(module: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--track needs the package {package} ({error}); pip install {package}") from None
