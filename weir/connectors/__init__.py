"""Systems that data comes from and goes to: the Protocols of sources and sinks, and a connector for each system.

Imports nothing of the runtime.
"""
