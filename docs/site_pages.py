"""What Sphinx adds to the pages: links into the repository, the command line's reference, and llms.txt."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import typer
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parent


def link_to_repository(text: str, repository: str) -> str:
    """``[a](../examples/b.py)`` of a page at any depth, as a link to the file in the repository."""
    return re.sub(
        r"\]\((?:\.\./)+((?:README\.md|LICENSE|examples|tests|benchmarks|pipec)[^)\s]*)\)",
        rf"]({repository}/blob/main/\1)",
        text,
    )


PUBLIC_MODULES = (
    "pipec",
    "pipec.integrations.accelerate",
    "pipec.integrations.lightning",
    "pipec.integrations.transformers",
)


def undocumented(pages: str) -> list[str]:
    """Public names that ``pages`` do not list, or that have no docstring of their own."""
    listed = set(re.findall(r"^\.\. auto\w+:: (\S+)", pages, re.MULTILINE))
    missing = []
    for home in PUBLIC_MODULES:
        module = importlib.import_module(home)
        for name in module.__all__:
            found = getattr(module, name)
            members = vars(found).items() if inspect.isclass(found) else ()
            missing += [] if f"{home}.{name}" in listed else [f"{home}.{name}: on no page"]
            missing += [] if vars(found).get("__doc__", found.__doc__) else [f"{home}.{name}: no docstring"]
            missing += [
                f"{home}.{name}.{member}: no docstring"
                for member, value in members
                if (inspect.isfunction(value) or isinstance(value, property))
                and not member.startswith("_")
                and not inspect.getdoc(getattr(found, member))
            ]
    return missing


def command_reference() -> str:
    """Every command of the command line with its arguments and options, from their definitions."""
    from pipec.cli import app

    group = typer.main.get_command(app)
    return "\n".join(_command(name, command) for name, command in _commands(group, "pipec"))


def _commands(group: Any, prefix: str) -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        name = f"{prefix} {name}"
        found += _commands(command, name) if hasattr(command, "commands") else [(name, command)]
    return found


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f"## {name}\n", f"```text\n{usage}\n```\n", (command.help or "").strip() + "\n"]
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            what, meaning = (re.sub(r"\s+", " ", each).strip() for each in record)
            lines.append(f"`{what}`\n: {meaning or '(no help)'}\n")
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    """The first sentence of a page in Markdown, without links; empty if the page begins otherwise."""
    prose = re.sub(r"<!--.*?-->|^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", prose):
        if re.match(r"[\w`]", paragraph):
            line = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph).split())
            return re.split(r"(?<=[.?:])\s", line)[0].removesuffix(":")
    return ""


def llms_text(config: Any, pages: dict[str, str]) -> str:
    """The pages of the site, one a line, for language models: https://llmstxt.org."""
    sections: dict[str, list[str]] = {}
    for name, title in pages.items():
        page = DOCS / f"{name}.md"
        about = first_sentence(page.read_text(encoding="utf-8")) if page.exists() else ""
        line = f"- [{title}]({config.html_baseurl}/{name}.html)" + (f": {about}" if about else "")
        sections.setdefault(name.rpartition("/")[0] or "in depth", []).append(line)
    summary = first_sentence((DOCS / "index.md").read_text(encoding="utf-8"))
    parts = [f"## {section.capitalize()}\n\n" + "\n".join(lines) for section, lines in sections.items()]
    return "\n\n".join([f"# {config.project}", f"> {summary}", *parts]) + "\n"


def _require_documented(app: Any) -> None:
    pages = "".join((DOCS / "reference" / f"{name}.md").read_text() for name in ("api", "integrations"))
    if missing := undocumented(pages):
        raise ExtensionError(
            "public names without documentation:\n  " + "\n  ".join(missing) + "\n"
            "Add each to docs/reference/api.md or integrations.md, and give it a docstring."
        )


def _read(app: Any, name: str, source: list[str]) -> None:
    if app.env.doc2path(name).suffix == ".md":
        repository = app.config.html_theme_options["source_repository"]
        source[0] = link_to_repository(source[0], repository)
        if name == "reference/cli":
            source[0] += "\n" + command_reference()


def _link_docstring(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """A docstring that names docs/memory.md links to that page of the site."""
    lines[:] = [re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", line) for line in lines]


def _finish(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        titles = app.env.titles.items()
        pages = {name: title.astext() for name, title in sorted(titles) if name != "index"}
        (Path(app.outdir) / "llms.txt").write_text(llms_text(app.config, pages), encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", _require_documented)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _link_docstring)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
