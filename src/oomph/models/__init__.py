"""A model's name as a program: its configuration, and the step that a Trainer of transformers makes of it."""

from oomph.models.finetuning import finetune as finetune
