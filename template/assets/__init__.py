"""What Dagster shows and runs."""
