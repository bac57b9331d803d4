"""What `--json` prints, described for what reads it."""
