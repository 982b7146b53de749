"""Logits that are not computed unless they are read: what fused_linear_cross_entropy lets a head return."""
