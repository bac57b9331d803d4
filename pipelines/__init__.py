"""Pipelines: what people write, and what runs it on Spark. Does not know Dagster."""
