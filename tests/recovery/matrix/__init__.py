"""The crash matrix: a run is disturbed at every single call that leaves the coordinator's or a task's memory.

    points    numbers those calls in a child, and disturbs one of them: SIGKILL, an error, a torn write, a lie, a hang
    pipeline  three small stages with state, a channel, two kinds of sinks, late rows and deleted keys
    replay    what that pipeline must have made of its input; imports nothing of Weir
    checks    tables, state, registry and storage against the replay and each other, by files alone
    trials    one trial: disturb, recover, check
    zygote    imports everything once, then forks a child for each step of a trial
    plan      which trials there are
    on_spark  the same points in a coordinator with Spark and in its workers

`make matrix` runs all of it; `tests/recovery/test_matrix.py` a spread sample.
"""
