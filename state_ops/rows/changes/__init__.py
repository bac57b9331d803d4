"""Aggregates over rows of which some take others back."""
