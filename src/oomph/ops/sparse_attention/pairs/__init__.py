"""Which (token, slot) pairs selected each block, and how they are cut into pieces of work."""
