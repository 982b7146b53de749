"""FSDP2 with shards, gradients and optimizer state on the host."""

from fsdp2_bf16 import main

if __name__ == "__main__":
    main(offloaded=True)
