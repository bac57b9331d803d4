"""The command for pull requests: `ci`."""
