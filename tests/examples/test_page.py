"""The page of the examples names each of them."""

from __future__ import annotations

from tests.docs.pages import ROOT


def test_every_program_is_on_the_page() -> None:
    page = (ROOT / "docs/howto/examples.md").read_text()
    files = [*(ROOT / "examples/torch").glob("*.py"), *(ROOT / "examples/mindspore").glob("*.py")]
    programs = [path for path in files if 'if __name__ == "__main__":' in path.read_text()]
    assert len(programs) > 9
    assert [path for path in programs if f"`{path.relative_to(ROOT)}`" not in page] == []
