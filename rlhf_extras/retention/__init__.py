"""Which registered versions are kept, and the deletion of the others."""
