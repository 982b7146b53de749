"""Token batches for the tests of the language models."""

import torch


def tokens(vocabulary, batch, length):
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(7))


def text_batch(vocabulary, batch, length):
    """A batch factory for a Workload."""

    def make(device):
        ids = torch.randint(0, vocabulary, (batch, length), device=device)
        return {"input_ids": ids, "labels": ids}

    return make
