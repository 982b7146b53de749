"""DistributedDataParallel, started by torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = nn.Sequential(
        nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 8192), nn.GELU(), nn.Linear(8192, 1024)
    ).to(local_rank)
    model = DDP(model, device_ids=[local_rank])
    data = TensorDataset(torch.randn(32768, 1024), torch.randn(32768, 1024))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4096, sampler=sampler, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(local_rank)), y.to(local_rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(epoch, loss.item())
            torch.save(model.module.state_dict(), "ddp.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
