#!/bin/sh
# Runs once, when the database volume is empty: a database for each server that keeps its state here.
set -eu
for name in prefect mlflow; do
  createdb --username "$POSTGRES_USER" "$name"
done
