"""Benchmarks leave out what was measured while the machine was another one."""

from benchmarks import pace


def test_a_measurement_in_which_the_pace_changed_is_made_anew_three_times_at_most(monkeypatch):
    looks = iter([50.0, 90.0, 50.0, 52.0, 50.0, 80.0, 80.0, 50.0, 50.0, 70.0])
    monkeypatch.setattr(pace, "probe", lambda: next(looks))
    made = iter(range(10))
    assert pace.steadily(lambda: next(made)) == (1, [50.0, 52.0])
    assert pace.steadily(lambda: next(made)) == (4, [50.0, 70.0]), "the last of three, with what tells against it"


def test_medians_rest_on_what_was_made_at_the_usual_pace():
    made = {"a": [50.0, 55.0], "b": [51.0, 49.0], "slow": [90.0, 91.0], "changed": [45.0, 60.0], "not looked at": []}
    used = pace.usual(list(made), made.__getitem__)
    assert used == ["a", "b", "not looked at"]
    said = pace.told(list(made), len(used), made.__getitem__)
    assert "45 to 91 ms" in said
    assert "2 of 5 measurements" in said
    assert pace.usual([1, 2], lambda _: []) == [1, 2]
    assert pace.told([1, 2], 2, lambda _: []) == ""


def test_the_look_takes_time():
    assert pace.probe() > 1
