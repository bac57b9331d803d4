"""The commands that play epochs again: `debug` and `explain`."""
