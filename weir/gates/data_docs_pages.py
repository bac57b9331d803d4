"""The pages of Data Docs, with which no value of a row can do anything.

Great Expectations puts some values into its pages as they are, and escapes others: which ones differs by release. So
each character with a meaning in HTML is replaced by a mark before Great Expectations sees it (`marked`), and each mark
by that character's name in HTML once the pages are written (`sealed`). A Content-Security-Policy is the second guard:
only the scripts of Great Expectations' own templates have the nonce with which a browser runs them.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import re
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from numbers import Number
from typing import Any

from great_expectations.core import ExpectationSuite
from great_expectations.render.renderer import ExpectationSuitePageRenderer, ValidationResultsPageRenderer
from great_expectations.render.view import DefaultJinjaIndexPageView, DefaultJinjaPageView
from jinja2 import BaseLoader, Environment

_MARKS = {ord(sign): chr(0xE100 + number) for number, sign in enumerate("<>&\"'`$")}  # of Unicode's private use area
_NAMES = {mark: html.escape(chr(sign)) for sign, mark in _MARKS.items()}
_MARKED = re.compile("|".join([*_NAMES, *(f"\\\\u{ord(mark):04x}" for mark in _NAMES)]))  # in JSON they are escaped
_HEAD = re.compile(r"<head>", re.IGNORECASE)
_HANDLERS = re.compile(
    r"""\sonclick="((?:showAllValidations|hideSucceededValidations|clearTableFilters)\((?:'[\w-]*')?\))\""""
)


def marked(value: Any) -> Any:
    """Return a value of a result with marks in its texts, as deep as it is."""
    if value is None or isinstance(value, Number | date | time | timedelta):
        return value
    if isinstance(value, Mapping):
        return {marked(key): marked(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [marked(item) for item in value]
    return str(value).translate(_MARKS)


def sealed(page: str, nonce: str) -> str:
    """Return a page that says by names in HTML what its marks stand for, and that runs no script without the nonce."""
    page = _MARKED.sub(lambda found: _NAMES[_mark(found[0])], page)
    handlers = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in _HANDLERS.findall(page))
    allowed = "".join(f" 'sha256-{each}'" for each in sorted(set(handlers)))
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'self' file: 'unsafe-inline';"
        " img-src 'self' file: data:; font-src 'self' file: data:;"
        # Vega makes functions of its charts' formulas. A handler is one of Great Expectations' buttons.
        f" script-src 'nonce-{nonce}' 'unsafe-eval' 'unsafe-hashes'{allowed}"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return _HEAD.sub(lambda head: head[0] + meta, page, count=1)


def _mark(found: str) -> str:
    return found if len(found) == 1 else chr(int(found[2:], 16))


class ResultsRenderer(ValidationResultsPageRenderer):
    """Renders results whose values and columns have marks."""

    def render(self, validation_results: Any, suite_parameters: Any = None) -> Any:
        """Render one page of results."""
        page = copy.copy(validation_results)
        page.results = [_marked_result(result) for result in validation_results.results]
        return super().render(page, suite_parameters)


def _marked_result(result: Any) -> Any:
    result = copy.copy(result)
    result.result, result.exception_info = marked(result.result), marked(result.exception_info)
    result.expectation_config = copy.copy(result.expectation_config)
    result.expectation_config.kwargs = marked(result.expectation_config.kwargs)
    return result


class SuiteRenderer(ExpectationSuitePageRenderer):
    """Renders expectations whose arguments have marks."""

    def render(self, expectations: Any) -> Any:
        """Render one page of expectations."""
        page = ExpectationSuite(name=expectations.name)
        page.expectations = [_marked_expectation(each) for each in expectations.expectations]
        return super().render(page)  # type: ignore[no-untyped-call]


def _marked_expectation(expectation: Any) -> Any:
    arguments = expectation.configuration.kwargs
    try:
        return type(expectation)(**marked(arguments))
    except Exception:  # a condition that is no condition with marks: an author's text, and the policy stands
        return expectation


class _Loader(BaseLoader):
    """Loads templates of Great Expectations whose scripts have a nonce."""

    def __init__(self, loader: BaseLoader, nonce: str) -> None:
        self._loader, self._nonce = loader, nonce

    def get_source(self, environment: Environment, template: str) -> tuple[str, str | None, Callable[[], bool] | None]:
        """Return the source, where it is, and what says whether it has changed."""
        source, *rest = self._loader.get_source(environment, template)
        return source.replace("<script", f'<script nonce="{self._nonce}"'), *rest  # type: ignore[return-value]


class PageView(DefaultJinjaPageView):
    """Makes a page whose scripts have a nonce."""

    def __init__(
        self, nonce: str, custom_styles_directory: str | None = None, custom_views_directory: str | None = None
    ) -> None:
        super().__init__(custom_styles_directory, custom_views_directory)
        self.env.loader = _Loader(self.env.loader, nonce)  # type: ignore[arg-type]  # it has one


class IndexView(DefaultJinjaIndexPageView):
    """Makes the first page, whose scripts have a nonce."""

    def __init__(
        self, nonce: str, custom_styles_directory: str | None = None, custom_views_directory: str | None = None
    ) -> None:
        super().__init__(custom_styles_directory, custom_views_directory)
        self.env.loader = _Loader(self.env.loader, nonce)  # type: ignore[arg-type]  # it has one


def site(directory: str, nonce: str) -> Mapping[str, Any]:
    """Return the configuration of a site in a directory, for Great Expectations' context."""

    def own(name: str, **more: str) -> dict[str, str]:
        return {"module_name": __name__, "class_name": name, **more}

    view = own("PageView", nonce=nonce)
    return {
        "class_name": "SiteBuilder",
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder", "view": own("IndexView", nonce=nonce)},
        "site_section_builders": {
            "expectations": {"renderer": own("SuiteRenderer"), "view": view},
            "validations": {"renderer": own("ResultsRenderer"), "view": view},
            "profiling": "None",  # nothing is profiled
        },
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": directory},
    }
