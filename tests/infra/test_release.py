"""A release: what is in it, that it works in a bare environment, and under which tag it may be published."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from packaging.version import Version

from infra import addresses, release
from state_ops.extras import version
from weir.settings.configuration import PROJECT

URLS = {
    "Repository": "https://git.example.com/somebody/weir",
    "Issues": "https://git.example.com/somebody/weir/issues",
    "Security": "mailto:security@example.com",
}
WORKFLOW = yaml.safe_load((PROJECT / ".github" / "workflows" / "release.yml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return release.build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def filled_in(monkeypatch):
    monkeypatch.setattr(addresses, "given", lambda: URLS)


@pytest.mark.long
def test_a_release_is_built_checked_and_runs_the_tutorials_pipeline_in_a_bare_environment():
    done = subprocess.run([sys.executable, "-m", "infra.release"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Caught up at checkpoint 2: 2 epochs, 4 rows." in done.stdout
    assert f"weir_state-{version()}-py3-none-any.whl" in done.stdout


def test_sdist_and_wheel_have_what_git_has_and_nothing_else(built):
    sdist, wheel = built
    expected = release.expected_in_wheel(release.git_files())
    assert release.in_wheel(wheel) == expected
    assert release.in_sdist(sdist) == expected | release.BESIDE
    assert {name.rpartition(".")[2] for name in expected} >= {"py", "zip", "j2", "lock", "properties", "yaml"}


def test_a_stray_file_and_a_missing_one_are_refused_by_name(built, tmp_path):
    wheel = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as packed, zipfile.ZipFile(wheel, "w") as other:
        for name in packed.namelist():
            if name != "weir/local/dagster.yaml":
                other.writestr(name, packed.read(name))
        other.writestr("tests/test_docs.py", "")
    stray, lacking = release.differences(release.in_wheel(wheel), release.expected_in_wheel(release.git_files()))
    with pytest.raises(SystemExit, match=r"stray:   tests/test_docs.py\n  lacking: weir/local/dagster.yaml"):
        release.refuse(wheel, stray, lacking)


def test_the_metadata_say_version_and_command(built):
    with zipfile.ZipFile(built[1]) as packed:
        texts = {
            name.rpartition("/")[2]: packed.read(name).decode() for name in packed.namelist() if ".dist-info/" in name
        }
    assert f"Name: weir-state\nVersion: {version()}\n" in texts["METADATA"]
    assert "weir = weir.cli.main:process" in texts["entry_points.txt"]


def test_a_tag_has_the_version_and_copier_takes_it_for_a_release(filled_in):
    release.check_tag(f"v{version()}")
    with pytest.raises(SystemExit, match=rf"v9.9.9, and pyproject.toml says {version()}"):
        release.check_tag("v9.9.9")
    assert not Version(f"v{version()}").is_prerelease, "`copier copy` passes over prereleases"
    pattern = re.search(r'regex_search\("(\^v\?[^"]+)"\)', (PROJECT / "answers.j2").read_text())
    assert pattern is not None and re.match(pattern[1], f"v{version()}")
    assert WORKFLOW[True]["push"]["tags"] == ["v[0-9]+.[0-9]+.[0-9]+"]  # YAML takes `on` for true


def test_a_release_without_addresses_is_not_published(monkeypatch):
    monkeypatch.setattr(addresses, "given", dict)
    with pytest.raises(SystemExit, match=r"\[project.urls\]"):
        release.check_tag(f"v{version()}")


def test_only_the_job_that_publishes_may_ask_for_a_token_and_it_runs_no_code_of_the_repository():
    assert WORKFLOW["permissions"] == {}
    may = {name for name, job in WORKFLOW["jobs"].items() if "id-token" in job["permissions"]}
    assert may == {"publish"}
    assert not any("run" in step or "checkout" in step["uses"] for step in WORKFLOW["jobs"]["publish"]["steps"])
    for job in WORKFLOW["jobs"].values():
        assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in job["steps"] if "uses" in step)
    assert any("make release TAG=" in step.get("run", "") for step in WORKFLOW["jobs"]["build"]["steps"])


# -- addresses


@pytest.mark.parametrize("page", addresses.PAGES)
def test_the_pages_show_the_addresses_of_pyproject(page):
    text = (PROJECT / page).read_text()
    assert text == addresses.marked(text, addresses.PAGES[page](addresses.given())), "run `python -m infra.addresses`"


def test_addresses_are_filled_in_at_one_place(tmp_path, monkeypatch):
    urls = "".join(f'{name} = "{url}"\n' for name, url in URLS.items())
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "weir-state"\n\n[project.urls]\n{urls}')
    for page in addresses.PAGES:
        shutil.copy(PROJECT / page, tmp_path)
    monkeypatch.setattr(addresses, "PROJECT", tmp_path)
    addresses.main()
    readme, security = ((tmp_path / page).read_text() for page in addresses.PAGES)
    assert f"]({URLS['Issues']})" in readme and f"]({URLS['Repository']}/blob/main/LICENSE)" in readme
    assert f"<{URLS['Security']}>" in security
    (tmp_path / "pyproject.toml").write_text('[project]\n[project.urls]\nRepository = "https://example.com"\n')
    with pytest.raises(SystemExit, match="it needs Repository, Issues, Security"):
        addresses.given()


def test_links_of_the_readme_work_on_an_index(filled_in):
    text = "![a page](docs/page.png) and [a\npage](docs/a.md#part), [theirs](https://example.com), [here](#part)"
    base = URLS["Repository"]
    assert addresses.absolute(text, "v0.1.0") == (
        f"![a page]({base}/raw/v0.1.0/docs/page.png) and [a\npage]({base}/blob/v0.1.0/docs/a.md#part), "
        "[theirs](https://example.com), [here](#part)"
    )
