"""Pipelines as Dagster assets, checks, jobs, sensors and schedules."""
