"""Dagster and a broker on this machine, for trying things out."""
