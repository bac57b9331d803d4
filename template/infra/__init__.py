"""What feeds and deploys the pipelines."""
