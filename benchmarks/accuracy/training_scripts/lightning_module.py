"""A Lightning module with a Trainer that makes its own optimizer, scheduler and validation."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, dim=1024, depth=6):
        super().__init__()
        self.save_hyperparameters()
        self.inputs = nn.Linear(256, dim)
        layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(dim, 50)

    def forward(self, x):
        return self.head(self.encoder(self.inputs(x)).mean(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


if __name__ == "__main__":
    L.seed_everything(42)
    data = TensorDataset(torch.randn(256, 256, 256), torch.randint(0, 50, (256,)))
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        logger=False,
    )
    trainer.fit(Classifier(), DataLoader(data, 32, shuffle=True), DataLoader(data, 32))
