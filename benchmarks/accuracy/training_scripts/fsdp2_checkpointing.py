"""FSDP2 with activation checkpointing: blocks are gathered again for their recomputation."""

from fsdp2_bf16 import main

if __name__ == "__main__":
    main(checkpointed=True, batch=8)
