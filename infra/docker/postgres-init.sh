#!/bin/sh
# Runs once, when the database volume is empty: creates a database for each server.
set -eu
for name in prefect mlflow; do
  createdb --username "$POSTGRES_USER" "$name"
done
