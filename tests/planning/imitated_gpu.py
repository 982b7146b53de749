"""`oomph` where CUDA sees a GPU, imitated on a build for CPUs: `python imitated_gpu.py WORDS`.

CUDA counts its GPUs once, less those that the driver's environment hides; forks keep the count. A backward
pass beside a GPU starts threads, after which forks of the process can run none.
"""

import ctypes
import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph

FakeTensorMode()  # it imports modules that would look for CUDA's functions
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
counted: list[int] = []
threads: list[int] = []  # the process that has started them


def count():
    if not counted:
        counted.append(0 if getenv(b"CUDA_VISIBLE_DEVICES") == b"" else 1)
    return counted[0]


def run_backward(*args, engine=graph._engine_run_backward, **kwargs):
    if threads and threads[0] != os.getpid():
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing"
        )
    if count() and not threads:
        threads.append(os.getpid())
    return engine(*args, **kwargs)


def imitate():
    from oomph.prediction.convolution import cudnn

    torch._C._cuda_getDeviceCount = count
    torch.cuda.is_available = torch.accelerator.is_available = lambda: count() > 0
    torch.cuda.device_count = lambda: 1  # NVML's
    graph._engine_run_backward = torch.autograd._engine_run_backward = run_backward
    cudnn._driver = lambda: ctypes.CDLL(None)  # not called here: cuDNN is asked in another process


if __name__ == "__main__":
    imitate()
    from oomph.cli.main import main

    sys.exit(main())
