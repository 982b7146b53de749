"""Training the five systems: configs, data, checkpoints, the loop."""
