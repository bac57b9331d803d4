"""Keyed state as a stage's function sees it: values, lists, maps, timers, TTL, caches.

Imports `rows`, `schema`, `arrow` and `backends`.
"""
