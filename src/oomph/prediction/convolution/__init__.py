"""Convolutions: what cuDNN allocates, asked or estimated."""
