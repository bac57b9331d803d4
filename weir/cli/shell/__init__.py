"""Completion of commands in shells, and facts about commands for scripts."""
