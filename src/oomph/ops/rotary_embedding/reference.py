"""Rotary embedding as it is defined: each pair of numbers of a head is a point, turned by its angle."""

import torch
from torch import Tensor


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] with the first 2 * cos.shape[-1] numbers turned; cos and sin broadcast to [..., R/2].

    Pairs are (i, i + R/2) ("neox", Llama) or (2i, 2i + 1) when interleaved (GPT-J). Computed in the dtype of
    cos, rounded to that of x at the end. Autograd keeps only cos and sin of it.
    """
    pairs = cos.shape[-1]
    turned, kept = x[..., : 2 * pairs].to(cos.dtype), x[..., 2 * pairs :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    new_first = first * cos - second * sin
    new_second = first * sin + second * cos
    if interleaved:
        turned = torch.stack((new_first, new_second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((new_first, new_second), dim=-1)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)
