"""The two branches whose keys lie in one unbroken range: compressed keys, and the window."""
