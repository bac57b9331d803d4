"""What runs a pipeline. Its rooms are listed from top to bottom in `pyproject.toml`; begin with `epoch/steps.py`."""
