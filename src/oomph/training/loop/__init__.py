"""The training loop: steps, schedule, evaluation, and what happens when something goes wrong."""
