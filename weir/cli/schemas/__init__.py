"""Models of the output of `--json`, for programs that read it."""
