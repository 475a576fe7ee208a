"""Engines: interface and plain torch (``base``), DeepSpeed, and the choice of one (``factory``)."""
