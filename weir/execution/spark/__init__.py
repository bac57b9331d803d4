"""Stages as Spark jobs: the session and its JVM, its jars and archives, plans, tasks, what its errors mean. It may
import all of `execution`; nothing else of that imports it."""
