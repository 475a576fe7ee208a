"""Parquet files in parts, and rows that stay in Arrow's form."""
