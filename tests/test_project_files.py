"""Links of all pages, files at the root, docs/stability.md, workflows and issue forms agree with the code."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_blocks import pages
from prose import CODE, WORST, faults

import pipec
from pipec.artifact.artifact import FORMAT as ARTIFACT
from pipec.checkpoint.metadata import FORMAT as CHECKPOINT
from pipec.cost.profile import VERSION as PROFILE
from pipec.hardware.topology import FORMAT as TOPOLOGY
from pipec.schedules import ENTRY_POINTS
from pipec.schedules.custom import FORMAT as SCHEDULE
from pipec.torch_compat.versions import untested_version

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/stability.md")

SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))["project"]


URLS = project()["urls"]
SITE = URLS["Documentation"] + "/en/latest/"


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_valid_by_their_published_schemas(schema: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    checker = shutil.which("check-jsonschema", path=path)
    if checker is None:
        pytest.skip("no `check-jsonschema`: it is in the extra dev")
    files = sorted(ROOT.glob(SCHEMAS[schema]))
    assert files
    command = [checker, "--builtin-schema", schema, "--default-filetype", "yaml", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):.*##", read("Makefile"), re.MULTILINE))
    called = [
        target
        for path in WORKFLOWS
        for target in re.findall(r"run: make ([\w-]+)", path.read_text(encoding="utf-8"))
    ]
    assert {"test", "full", "package"} <= {*called} <= targets


def test_the_matrix_has_every_supported_version_of_python_and_torch() -> None:
    job = yaml.safe_load(read(".github/workflows/tests.yml"))["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    supported = {
        each.rpartition(" ")[2] for each in project()["classifiers"] if re.search(r":: 3\.\d+$", each)
    }
    allowed_to_fail = set(re.findall(r"3\.\d+", job["continue-on-error"]))
    assert {*matrix["python"]} - allowed_to_fail == supported
    versions = {*matrix["torch"], *(each["torch"] for each in matrix["include"])}
    minors = {tuple(map(int, each.split(".")[:2])) for each in versions}
    assert minors == {(2, minor) for minor in range(11, 16)}
    assert all(untested_version(each) is None for each in versions)
    assert {each["python"] for each in matrix["include"]} <= supported


def test_publishing_needs_no_token_and_the_tag_of_the_version(tmp_path: Path) -> None:
    jobs = yaml.safe_load(read(".github/workflows/release.yml"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in read(".github/workflows/release.yml")
    check = next(
        each["run"] for each in jobs["build"]["steps"] if each.get("name") == "the tag is the version"
    )
    for tag, status in ((f"v{pipec.__version__}", 0), (f"v{pipec.__version__}.1", 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment, capture_output=True)
        assert done.returncode == status


def test_changelog_and_citation_have_the_version() -> None:
    (newest, *_) = re.findall(r"^## (\S+) \(", read("CHANGELOG.md"), re.MULTILINE)
    assert newest == pipec.__version__
    assert yaml.safe_load(read("CITATION.cff"))["version"] == pipec.__version__


def test_the_pages_name_formats_and_versions_as_the_code_has_them() -> None:
    written = f"{ARTIFACT}, {CHECKPOINT}, pipec profile {PROFILE}, {TOPOLOGY}, {SCHEDULE}."
    assert written.replace("pipec ", "") in read("CHANGELOG.md")
    stability = read("docs/stability.md")
    (torch,) = (each for each in project()["dependencies"] if each.startswith("torch"))
    others = sorted(re.split(r"[<>=]", each)[0] for each in project()["dependencies"] if each != torch)
    for each in (TOPOLOGY, SCHEDULE, torch, ENTRY_POINTS, f"pip install {' '.join(others)}"):
        assert each in stability


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_pages_name_are_there(page: str) -> None:
    paths = re.findall(r"`((?:pipec|tests|docs|benchmarks)/[\w./-]+)`", read(page))
    assert [each for each in paths if not (ROOT / each).exists()] == []


def test_prose_is_plain_and_its_check_can_fail() -> None:
    assert list(faults()) == []
    text = "A stage, the weights of which `whose` are those of a rank.\n```\nanew\n```\n"
    assert [found[0] for found in WORST.finditer(CODE.sub("", text))] == ["of which", "those of"]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as the site and GitHub make them from its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that do not exist, also those into the site and the repository."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        in_repository = re.match(re.escape(URLS["Homepage"]) + "/(?:blob|raw|tree)/main/(.*)", path)
        if path.startswith(SITE):
            target = ROOT / "docs" / path.removeprefix(SITE).replace(".html", ".md")
        elif in_repository:
            target = ROOT / in_repository[1]
        elif ":" in path:
            continue
        else:
            target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    return broken


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    right = ["#one-two", f"{SITE}batch.html#branches-on-values", f"{URLS['Homepage']}/blob/main/README.md"]
    other = ["https://example.org/none.md", "mailto:nobody@example.org"]
    broken = ["#no", "page.md#one", "none.md", f"{SITE}none.html", f"{SITE}batch.html#no"]
    broken.append(f"{URLS['Homepage']}/blob/main/none.py")
    page = tmp_path / "page.md"
    links = " ".join(f"[link]({each})" for each in right + other + broken)
    page.write_text(f"# One, `two`\n```\n# no\n```\n{links}\n")
    assert broken_links(page) == broken


def test_links_lead_to_files_and_headings() -> None:
    everything = [*ROOT.glob("*.md"), *pages()]
    assert {str(page.relative_to(ROOT)): found for page in everything if (found := broken_links(page))} == {}
