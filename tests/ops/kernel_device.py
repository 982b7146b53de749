"""Where the tests run Triton kernels: on a GPU, or in Triton's interpreter on the CPU."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 wrongly: it cuts it off where a GPU rounds.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
