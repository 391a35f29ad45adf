"""Block-AdamW in Lightning: a run that stops after one epoch and resumes from its checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from blockadapt import BlockAdamW, SpectrumClip, param_groups


class Classifier(lightning.LightningModule):
    """A small network; `configure_optimizers` is all that concerns blockadapt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 5))

    def configure_optimizers(self) -> dict[str, object]:
        """Groups by kind of layer, and a schedule that the spectrum's bounds follow."""
        groups = param_groups(self, weight_decay=0.1, decay_norms_and_biases=False)
        optimizer = BlockAdamW(groups, lr=1e-2, clip=SpectrumClip(final_lr=0.1, gamma=0.05))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a minibatch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss


def batches() -> DataLoader[tuple[Tensor, ...]]:
    """Noise around five centres."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(128) % 5
    x = torch.randn(5, 20, generator=generator)[y] + torch.randn(128, 20, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def trainer(folder: Path, epochs: int) -> lightning.Trainer:
    """Make a quiet trainer on the CPU that keeps its last checkpoint."""
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="last")],
    )


def resumed(folder: Path) -> tuple[Classifier, lightning.Trainer]:
    """Train one epoch, then let a new model and a new trainer go on from the checkpoint to the third."""
    trainer(folder, epochs=1).fit(Classifier(), batches())
    model, again = Classifier(), trainer(folder, epochs=3)
    again.fit(model, batches(), ckpt_path=folder / "last.ckpt")
    return model, again


def main() -> None:
    """Stop, resume, and show the loss."""
    with tempfile.TemporaryDirectory() as folder:
        _, done = resumed(Path(folder))
    print(f"loss {done.callback_metrics['loss'].item():.3f} after epoch {done.current_epoch}")


if __name__ == "__main__":
    main()
