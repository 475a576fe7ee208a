"""Containers: files of any kind and compression as records."""
