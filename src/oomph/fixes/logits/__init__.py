"""Logits that are not computed unless they are read: what fix "fused_loss" lets a head return."""
