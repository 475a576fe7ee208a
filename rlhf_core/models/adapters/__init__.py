"""Adapters on frozen weights: LoRA, 4-bit weights under it, and models of the lower layers."""
