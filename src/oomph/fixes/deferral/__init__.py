"""Results that are put off: what stands for them, the modes that make it, and when to do without."""
