"""Watching pipelines: looks at storage, problems, `weir top`, `weir report --html`."""
