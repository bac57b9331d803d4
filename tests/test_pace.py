"""Benchmarks leave out what was measured while the machine was another one."""

from benchmarks import harness


def test_a_measurement_in_which_the_pace_changed_is_made_anew_three_times_at_most(monkeypatch):
    looks = iter([50.0, 90.0, 50.0, 52.0, 50.0, 80.0, 80.0, 50.0, 50.0, 70.0])
    monkeypatch.setattr(harness, "probe", lambda: next(looks))
    counter = iter(range(10))
    assert harness.measure_steadily(lambda: next(counter)) == (1, [50.0, 52.0])
    assert harness.measure_steadily(lambda: next(counter)) == (4, [50.0, 70.0]), (
        "the last of three, with what tells against it"
    )


def test_medians_rest_on_what_was_made_at_the_usual_pace():
    paces = {"a": [50.0, 55.0], "b": [51.0, 49.0], "slow": [90.0, 91.0], "changed": [45.0, 60.0], "not looked at": []}
    used = harness.at_usual_pace(list(paces), paces.__getitem__)
    assert used == ["a", "b", "not looked at"]
    sentence = harness.pace_sentence(list(paces), len(used), paces.__getitem__)
    assert "45 to 91 ms" in sentence
    assert "2 of 5 measurements" in sentence
    assert harness.at_usual_pace([1, 2], lambda _: []) == [1, 2]
    assert harness.pace_sentence([1, 2], 2, lambda _: []) == ""


def test_the_look_takes_time():
    assert harness.probe() > 1
