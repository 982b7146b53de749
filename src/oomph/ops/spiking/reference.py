"""The leaky integrate-and-fire gate by definition, one step at a time; autograd saves every step.

Per channel, with the membrane m starting at `initial` (or 0):

    m <- decay * m + drive_t            integrate, and leak
    s_t = 1 if m > threshold else 0     fire
    m <- m - s_t * threshold            soft reset: what is above the threshold stays

The step 1[m > threshold] has no useful gradient, so backward takes that of a smooth step in its place:

    ds/dm = d/dm sigmoid(beta * (m - threshold)) = beta * sigmoid'(beta * (m - threshold))

The factor beta belongs to it. It is then the true gradient of a function whose total rise is 1, as a spike's
is, whatever beta: a larger beta makes it narrower and higher. The gradient also flows through the s_t that is
subtracted in the reset, as the chain rule has it; nothing is detached.
"""

import torch
from torch import Tensor


def lif_gate_reference(
    drive: Tensor, decay: float, threshold: float, surrogate_beta: float, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """drive [B, T, ...] -> spikes [B, T, ...] in its dtype, final membrane [B, ...] in float32 or wider."""
    wide = torch.promote_types(drive.dtype, torch.float32)
    membrane = drive.new_zeros((drive.shape[0], *drive.shape[2:]), dtype=wide)
    if initial is not None:
        membrane = initial.to(wide)
    spikes = []
    for now in drive.to(wide).unbind(1):
        membrane = decay * membrane + now
        smooth = torch.sigmoid(surrogate_beta * (membrane - threshold))
        # The value is exactly 0 or 1 (NaN for NaN), the gradient that of the smooth step.
        spike = (membrane > threshold).to(wide) + (smooth - smooth.detach())
        membrane = membrane - spike * threshold
        spikes.append(spike)
    stacked = torch.stack(spikes, dim=1) if spikes else torch.empty_like(drive)
    return stacked.to(drive.dtype), membrane
