"""A small convolutional network on images of 32 x 32, with an accuracy on held-out images."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset


class RandomImages(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(3, 32, 32), index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv3 = nn.Conv2d(128, 256, 3, padding=1)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(64), nn.BatchNorm2d(128), nn.BatchNorm2d(256)
        self.fc1 = nn.Linear(256 * 4 * 4, 1024)
        self.fc2 = nn.Linear(1024, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        return self.fc2(F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training))


if __name__ == "__main__":
    train = DataLoader(RandomImages(2560), batch_size=512, num_workers=2, pin_memory=True)
    test = DataLoader(RandomImages(1024), batch_size=1024)
    net = Net().cuda()
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for epoch in range(2):
        net.train()
        for images, labels in train:
            loss = F.cross_entropy(net(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        net.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                correct += (net(images.cuda()).argmax(1) == labels.cuda()).sum().item()
        print(epoch, loss.item(), correct / 1024)
