"""The low-rank products of backward that read g [N, f], in plain torch on any device.

Legend: N tokens, f out, r the rank.
"""

from torch import Tensor


def pull_back(g_Nf: Tensor, p_fr: Tensor | None, t_Nr: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """g p and g^T t, each where its factor is given."""
    u_Nr = None if p_fr is None else g_Nf @ p_fr
    grad_fr = None if t_Nr is None else g_Nf.t() @ t_Nr
    return u_Nr, grad_fr
