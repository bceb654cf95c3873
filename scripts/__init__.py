"""Programs of the project beside its packages; run from its folder."""
