"""The state engine and the control plane of checkpoints. Knows neither Spark nor Dagster."""
