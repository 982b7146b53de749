"""Where people already work: pytest, Jupyter, Hugging Face's Trainer, Lightning."""
