"""Replies: generated for evaluation, recorded, and as metrics and judges see them."""
