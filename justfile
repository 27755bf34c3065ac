# `just check`, `just test`, `just docs`, `just nightly`: what CONTRIBUTING describes. Needs `pip install -e '.[dev]'`.

check:
    ruff check
    ruff format --check
    mypy

test *arguments:
    python -m pytest {{arguments}}

docs:
    python -m sphinx -W -q docs build/site

nightly *arguments:
    .ci/nightly {{arguments}}
