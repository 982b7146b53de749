"""The five systems, healthy: plain single-device models. Techniques are applied to them from outside."""
