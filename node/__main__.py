"""``python -m node``: the same as the ``sentinel`` command."""

from node.cli import main

raise SystemExit(main())
