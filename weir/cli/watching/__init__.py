"""What people and programs watch pipelines with: looks at storage, what is wrong, `weir top`, `weir report --html`."""
